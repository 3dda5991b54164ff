"""What every rank's parameters must be, made slowly and from the libraries' own rules, without the catalog's boxes.

Full tensors are cut with cat, chunk and loops over heads, as the loaders of Megatron and vLLM do it.
"""

import torch
from torch import Tensor

from engine.layout import ModelShape, ParallelLayout

UNTOUCHED = -7.0
"""What destination memory holds before a transfer; padding must still hold it afterwards."""


def full_tensors(shape: ModelShape, names_and_shapes: dict, seed: int = 0) -> dict[str, Tensor]:
    """Random values for every Hugging Face tensor."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, generator=generator) for name, size in names_and_shapes.items()}


def pad_rows(table: Tensor, rows: int, fill: float) -> Tensor:
    return torch.cat([table, torch.full((rows - len(table), table.shape[1]), fill)])


def megatron_params(full: dict[str, Tensor], shape: ModelShape, layout: ParallelLayout, rank: int,
                    options: tuple[int, int] = (1, 1)) -> dict[str, Tensor]:
    """The parameters of a GPTModel (a list of them, named `model{i}.`, with virtual stages) on one rank."""
    vocab_multiple, virtual_stages = options
    tp_rank, dp_rank, pp_rank = rank % layout.tp, rank // layout.tp % layout.dp, rank // layout.tp // layout.dp
    rows = -(-shape.vocab_size // (vocab_multiple * layout.tp)) * vocab_multiple * layout.tp

    def table(name):
        return pad_rows(full[name], rows, UNTOUCHED).chunk(layout.tp)[tp_rank]

    out, per_chunk = {}, shape.num_layers // layout.pp // virtual_stages
    for chunk in range(virtual_stages):
        prefix = f"model{chunk}." if virtual_stages > 1 else ""
        first, last = pp_rank == chunk == 0, (pp_rank, chunk) == (layout.pp - 1, virtual_stages - 1)
        if first:
            out[prefix + "embedding.word_embeddings.weight"] = table("model.embed_tokens.weight")
        for local in range(per_chunk):
            layer = (chunk * layout.pp + pp_rank) * per_chunk + local
            own = {name.removeprefix(f"model.layers.{layer}."): value for name, value in full.items()
                   if name.startswith(f"model.layers.{layer}.")}
            for name, value in megatron_layer(own, shape, layout, (tp_rank, dp_rank % layout.ep)).items():
                out[f"{prefix}decoder.layers.{local}.{name}"] = value
        if last:
            out[prefix + "decoder.final_layernorm.weight"] = full["model.norm.weight"]
            if not shape.tied_embeddings:
                out[prefix + "output_layer.weight"] = table("lm_head.weight")
            elif layout.pp > 1:
                out[prefix + "output_layer.weight"] = table("model.embed_tokens.weight")
    return out


def megatron_layer(own: dict[str, Tensor], shape: ModelShape, layout: ParallelLayout,
                   place: tuple[int, int]) -> dict[str, Tensor]:
    tp_rank, ep_rank = place
    out = {"input_layernorm.weight": own["input_layernorm.weight"],
           "pre_mlp_layernorm.weight": own["post_attention_layernorm.weight"]}
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" not in own:
            continue
        q, k, v = (own[f"self_attn.{part}_proj.{kind}"].split(shape.head_dim) for part in "qkv")
        per_group, heads = shape.num_heads // shape.num_kv_heads, []
        for group in range(shape.num_kv_heads):
            heads += [*q[group * per_group:(group + 1) * per_group], k[group], v[group]]
        out[f"self_attention.linear_qkv.{kind}"] = torch.cat(heads).chunk(layout.tp)[tp_rank]
    out["self_attention.linear_proj.weight"] = own["self_attn.o_proj.weight"].chunk(layout.tp, 1)[tp_rank]
    if "self_attn.o_proj.bias" in own:
        out["self_attention.linear_proj.bias"] = own["self_attn.o_proj.bias"]
    if shape.qk_norm:
        out["self_attention.q_layernorm.weight"] = own["self_attn.q_norm.weight"]
        out["self_attention.k_layernorm.weight"] = own["self_attn.k_norm.weight"]
    if not shape.num_experts:
        return out | megatron_mlp(own, "mlp.{}_proj.", "mlp.", layout.tp, tp_rank)
    out["mlp.router.weight"] = own[router_name(shape)]
    each = shape.num_experts // layout.ep
    for local in range(each):
        names = expert_names(shape, ep_rank * each + local)
        renamed = {f"{part}.weight": own[name] for part, name in names.items()}
        out |= megatron_mlp(renamed, "{}.", f"mlp.experts.local_experts.{local}.", layout.tp, tp_rank)
    return out


def megatron_mlp(own: dict[str, Tensor], source: str, target: str, tp: int, tp_rank: int) -> dict[str, Tensor]:
    out = {}
    for kind in ("weight", "bias"):
        if source.format("gate") + kind in own:
            gate, up = (own[source.format(part) + kind].chunk(tp)[tp_rank] for part in ("gate", "up"))
            down = own[source.format("down") + kind]
            out[f"{target}linear_fc1.{kind}"] = torch.cat([gate, up])
            out[f"{target}linear_fc2.{kind}"] = down.chunk(tp, 1)[tp_rank] if kind == "weight" else down
    return out


def router_name(shape: ModelShape) -> str:
    return "block_sparse_moe.gate.weight" if shape.family == "mixtral" else "mlp.gate.weight"


def expert_names(shape: ModelShape, expert: int) -> dict[str, str]:
    if shape.family == "mixtral":
        prefix, names = f"block_sparse_moe.experts.{expert}.", {"gate": "w1", "down": "w2", "up": "w3"}
    else:
        prefix, names = f"mlp.experts.{expert}.", {part: f"{part}_proj" for part in ("gate", "up", "down")}
    return {part: f"{prefix}{name}.weight" for part, name in names.items()}


def vllm_params(full: dict[str, Tensor], shape: ModelShape, tp: int, rank: int, *,
                expert_parallel: bool = False) -> dict[str, Tensor]:
    """The parameters of vLLM's model on one rank."""
    tp_rank, rows = rank % tp, -(-shape.vocab_size // 64) * 64
    out = {"model.norm.weight": full["model.norm.weight"]}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in full:
            out[name] = pad_rows(full[name], rows, UNTOUCHED).chunk(tp)[tp_rank]
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        own = {name.removeprefix(prefix): value for name, value in full.items() if name.startswith(prefix)}
        for name, value in vllm_layer(own, shape, tp, tp_rank, expert_parallel).items():
            out[prefix + name] = value
    return out


def vllm_layer(own: dict[str, Tensor], shape: ModelShape, tp: int, tp_rank: int,
               expert_parallel: bool) -> dict[str, Tensor]:
    out = {name: own[name] for name in ("input_layernorm.weight", "post_attention_layernorm.weight",
                                        "self_attn.o_proj.bias", "mlp.down_proj.bias", "self_attn.q_norm.weight",
                                        "self_attn.k_norm.weight") if name in own}
    replicas = max(1, tp // shape.num_kv_heads)
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" in own:
            q = own[f"self_attn.q_proj.{kind}"].chunk(tp)[tp_rank]
            k, v = (own[f"self_attn.{part}_proj.{kind}"].chunk(tp // replicas)[tp_rank // replicas] for part in "kv")
            out[f"self_attn.qkv_proj.{kind}"] = torch.cat([q, k, v])
        if f"mlp.gate_proj.{kind}" in own:
            parts = [own[f"mlp.{part}_proj.{kind}"].chunk(tp)[tp_rank] for part in ("gate", "up")]
            out[f"mlp.gate_up_proj.{kind}"] = torch.cat(parts)
    out["self_attn.o_proj.weight"] = own["self_attn.o_proj.weight"].chunk(tp, 1)[tp_rank]
    if not shape.num_experts:
        return out | {"mlp.down_proj.weight": own["mlp.down_proj.weight"].chunk(tp, 1)[tp_rank]}
    module = "block_sparse_moe" if shape.family == "mixtral" else "mlp"
    out[f"{module}.gate.weight"] = own[router_name(shape)]
    each = shape.num_experts // tp if expert_parallel else shape.num_experts
    first, cut, index = (tp_rank * each, 1, 0) if expert_parallel else (0, tp, tp_rank)
    w13, w2 = [], []
    for expert in range(first, first + each):
        gate, up, down = (own[expert_names(shape, expert)[part]] for part in ("gate", "up", "down"))
        w13.append(torch.cat([gate.chunk(cut)[index], up.chunk(cut)[index]]))
        w2.append(down.chunk(cut, 1)[index])
    out[f"{module}.experts.routed_experts.w13_weight"] = torch.stack(w13)
    out[f"{module}.experts.routed_experts.w2_weight"] = torch.stack(w2)
    return out


def fsdp_params(full: dict[str, Tensor], world_size: int, rank: int) -> dict[str, Tensor]:
    """Dim-0 shards as FSDP2 cuts them: chunk, and nothing beyond the last."""
    out = {}
    for name, value in full.items():
        chunks = value.chunk(world_size)
        out[name] = chunks[rank] if rank < len(chunks) else value[:0]
    return out
