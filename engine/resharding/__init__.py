"""Resharding: weights from any layout to any other, each missing byte once. Importing it costs nothing.

The pieces, in the order they are used:

    src = MegatronSharding(shape, layout)                    # engine.resharding.megatron   torch-free
    dst = VllmSharding(shape, generation_layout, world_size)  # engine.resharding.vllm      torch-free
    load_hf(model_dir, src.holdings(rank), megatron_params)  # engine.resharding.load
    plan = plan_rank(src, dst, rank, placement)              # engine.resharding.plan       torch-free
    sync = WeightSync(plan, megatron_params, vllm_params, group)  # engine.resharding.execute
    report = sync.run(policy_version)                        # moves only when the version is new
    sync.require(policy_version)                             # before generating: ReshardError if it is not served
    export_hf(model_dir, out_dir, src, megatron_params)      # engine.resharding.export

`params` are dicts of a rank's own parameters by the library's own names: `dict(model.named_parameters())` of Megatron's
unwrapped GPTModel or of vLLM's model (tensors may be `nn.Parameter`s; they are read and written in place).
"""
