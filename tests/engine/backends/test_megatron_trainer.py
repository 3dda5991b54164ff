"""Steps that must not be taken, learning rates, and the values of a critic."""

import math

import pytest
import torch

from engine.errors import LayoutError, ModelError, NumericsError, SpecError
from engine.spec.train import OptimizerSpec
from tests.engine.backends.megatron_cases import by_sample, huggingface_outputs, replica_rows, rows, signal_loss
from tests.engine.multiprocess import RankFailed, run_ranks, shared_ranks
from tests.engine.resharding.hf_models import make_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("model"), "qwen2"))


def trained(layout, model_dir, head="logprobs", **options):
    from engine.backends.megatron.parallel import start_world
    from engine.backends.megatron.trainer import TrainedModel, load_network
    from engine.layout import ParallelLayout

    world = start_world(ParallelLayout(**layout))
    network = load_network(model_dir, world, head, **options)
    return TrainedModel(world, network, 40, OptimizerSpec(lr=0.1), total_steps=10)


def step_with_nan(layout, model_dir, bad_sample, steps):
    """Train; in the steps of `steps` that are True the loss of one sample is NaN. What happened, and what is left."""
    from engine.backends.megatron.heads import LogprobHead

    model = trained(layout, model_dir)
    batch, before, reports = replica_rows(model.world), None, []

    def loss(outputs, microbatch):
        value, sums = signal_loss(outputs, microbatch)
        if bad and bad_sample in microbatch["sample_ids"].tolist():
            value = value * torch.nan
        return value, sums

    for bad in steps:
        before = {name: param.detach().clone() for name, param in model.params().items()}
        moments = [state["exp_avg"].clone() for part in model.optimizer.parts
                   for state in part.optimizer.state.values()]
        try:
            reports.append(model.train_step(batch, LogprobHead(), loss))
        except NumericsError as error:
            return reports, str(error)
        kept = all(torch.equal(before[name], param) for name, param in model.params().items())
        kept_moments = all(torch.equal(old, state["exp_avg"]) for old, state in zip(
            moments, [s for part in model.optimizer.parts for s in part.optimizer.state.values()], strict=True))
        assert kept == kept_moments == bad
    return reports, None


@pytest.mark.parametrize(("world_size", "layout"), [(1, {}), (2, {"dp": 2}), (2, {"pp": 2}), (2, {"tp": 2})], ids=str)
def test_a_loss_that_is_not_finite_on_one_rank_leaves_all_ranks_as_they_were(world_size, layout, model_dir):
    results = shared_ranks(world_size).run(step_with_nan, layout, model_dir, 7, [False, True, False, True, True])
    for reports, error in results:
        assert [report.skipped for report in reports] == [False, True, False, True, True]
        assert error is None
        assert math.isfinite(reports[2].loss) and math.isfinite(reports[2].grad_norm)


def test_the_third_step_in_a_row_that_is_not_finite_ends_the_run_with_the_samples(model_dir):
    for reports, error in shared_ranks(2).run(step_with_nan, {"dp": 2}, model_dir, 7, [False, True, True, True, False]):
        assert len(reports) == 3
        assert "3 in a row" in error and "7" in error
        assert NumericsError.exit_code == 4


def values_of(layout, model_dir, sequence_parallel):
    """A critic with a known head: its values at first, with the head, and what two steps do to them."""
    from engine.backends.megatron.heads import value_head

    model = trained(layout, model_dir, "values", sequence_parallel=sequence_parallel)
    batch = replica_rows(model.world)
    at_first = model.forward(batch, value_head)["values"]
    if model.world.is_last_stage:
        with torch.no_grad():
            model.params()["value_head.weight"].copy_(torch.linspace(-1, 1, 32)[None])
    known = model.forward(batch, value_head)["values"]
    reports = [model.train_step(batch, value_head, signal_loss) for _ in range(2)]
    learned = model.forward(batch, value_head)["values"]
    return batch["sample_ids"], batch["response_lengths"], at_first, known, learned, reports


def test_values_are_zero_at_first_and_linear_in_the_state_before_each_token_under_every_layout(model_dir):
    from transformers import AutoModelForCausalLM

    batch, expected = rows(), {}
    backbone = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).model
    lengths = zip(batch["prompt_lengths"].tolist(), batch["response_lengths"].tolist(), strict=True)
    with torch.no_grad():
        for row, (prompt, response) in enumerate(lengths):
            states = backbone(batch["input_ids"][None, row, : prompt + response]).last_hidden_state[0]
            expected[row] = states[prompt - 1 : -1] @ torch.linspace(-1, 1, 32)
    learned = None
    for world_size, layout, sequence_parallel in (
            (1, {}, False), (2, {"tp": 2}, False), (2, {"tp": 2}, True), (2, {"pp": 2}, False), (2, {"dp": 2}, False)):
        results = shared_ranks(world_size).run(values_of, layout, model_dir, sequence_parallel)
        assert all(not result[2].any() for result in results)
        for sample, values in by_sample([(ids, lens, known) for ids, lens, _, known, *_ in results]).items():
            torch.testing.assert_close(values, expected[sample], rtol=1e-5, atol=1e-5)
        after = by_sample([(ids, lens, last) for ids, lens, _, _, last, _ in results])
        learned = learned or (after, results[0][5])
        for sample, values in after.items():
            torch.testing.assert_close(values, learned[0][sample], rtol=1e-3, atol=1e-3)
        assert results[0][5][1].grad_norm == pytest.approx(learned[1][1].grad_norm, rel=1e-4)


def frozen_logprobs(model_dir):
    from engine.backends.megatron.heads import LogprobHead
    from engine.backends.megatron.parallel import start_world
    from engine.backends.megatron.trainer import Model, load_network
    from engine.layout import ParallelLayout

    world = start_world(ParallelLayout())
    batch = rows()
    model = Model(world, load_network(model_dir, world, "logprobs"), 40)
    return batch["sample_ids"], batch["response_lengths"], model.forward(batch, LogprobHead(1.0))["logprobs"]


def test_a_model_without_optimizer_computes_logprobs(model_dir):
    from transformers import AutoModelForCausalLM

    expected, _ = huggingface_outputs(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32), rows(), 1.0)
    for sample, logprobs in by_sample(shared_ranks(1).run(frozen_logprobs, model_dir)).items():
        torch.testing.assert_close(logprobs, expected[sample], rtol=1e-5, atol=1e-5)


def test_learning_rates_follow_the_schedule():
    from engine.backends.megatron.schedule import learning_rate

    def rates(total, **settings):
        return [learning_rate(step, OptimizerSpec(lr=1.0, **settings), total) for step in range(total + 2)]

    assert rates(3) == [1.0] * 5
    assert rates(4, warmup_steps=2) == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert rates(4, schedule="linear", min_lr_share=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    assert rates(4, schedule="cosine", min_lr_share=0.0, decay_steps=2) == pytest.approx([1.0, 0.5, 0.0, 0.0, 0.0, 0.0])
    assert rates(5, schedule="linear", warmup_steps=1, min_lr_share=0.0) == pytest.approx([1, 1, .75, .5, .25, 0, 0])


def test_a_warm_up_longer_than_the_schedule_is_refused_with_both_numbers():
    from engine.backends.megatron.schedule import check_schedule

    with pytest.raises(SpecError, match="warmup_steps 10 is not below the 8 steps of the cosine schedule"):
        check_schedule(OptimizerSpec(lr=1.0, schedule="cosine", warmup_steps=10), 8)
    check_schedule(OptimizerSpec(lr=1.0, warmup_steps=10), 8)


@pytest.mark.parametrize(("change", "message"), [
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "rope_type 'yarn'"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"use_sliding_window": True}, "sliding-window"),
    ({"model_type": "mixtral", "num_local_experts": 4}, "'mixtral' is not supported"),
    ({"model_type": "llama", "attention_bias": True}, "attention_bias=True with mlp_bias=False"),
])
def test_models_that_would_be_computed_wrongly_are_refused(change, message, model_dir, tmp_path):
    import json
    from pathlib import Path

    from engine.backends.megatron.config import read_model_config

    config = json.loads((Path(model_dir) / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        read_model_config(tmp_path)


@pytest.mark.parametrize("parameters", [
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 8192},
])
def test_rotary_frequencies_equal_those_of_transformers(parameters, tmp_path):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from engine.backends.megatron.config import read_model_config

    config = LlamaConfig(hidden_size=256, num_attention_heads=2, rope_parameters=parameters)
    config.save_pretrained(tmp_path)
    own = read_model_config(tmp_path).rope.inverse_frequencies(128)
    torch.testing.assert_close(own, LlamaRotaryEmbedding(config).inv_freq, rtol=2e-7, atol=0)


def world_of(layout):
    from engine.backends.megatron.parallel import start_world
    from engine.layout import ParallelLayout

    world = start_world(ParallelLayout(**layout))
    return world.rank, world.dp_rank, world.is_lead, world.is_first_stage, world.is_last_stage, world.last_stage_rank


def test_ranks_know_their_place():
    places = shared_ranks(4).run(world_of, {"tp": 2, "pp": 2})
    assert places == [(0, 0, True, True, False, 2), (1, 0, False, True, False, 3),
                      (2, 0, False, False, True, 2), (3, 0, False, False, True, 3)]


def test_a_layout_for_another_number_of_ranks_is_refused_with_the_numbers():
    with pytest.raises(RankFailed, match=r"LayoutError: layout tp=2 pp=1 dp=2 needs 4 ranks but the job has 2"):
        run_ranks(world_of, 2, {"tp": 2, "dp": 2})


def test_one_process_without_torchrun_is_a_world_of_one():
    import subprocess
    import sys

    code = ("from engine.backends.megatron.parallel import start_world\nfrom engine.layout import ParallelLayout\n"
            "world = start_world(ParallelLayout()); print(world.size, world.rank, world.is_lead)")
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["1", "0", "True"], done.stderr


def build_with_experts(model_dir):
    from engine.backends.megatron.model import build_model
    from engine.backends.megatron.parallel import start_world
    from engine.layout import ParallelLayout

    with pytest.raises(LayoutError, match="ep=2"):
        build_model(model_dir, start_world(ParallelLayout(dp=2, ep=2)), "logprobs")


def test_expert_parallelism_of_a_dense_model_is_refused(model_dir):
    shared_ranks(2).run(build_with_experts, model_dir)
