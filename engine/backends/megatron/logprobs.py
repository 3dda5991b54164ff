"""Logprobs and entropies of chosen tokens from hidden states, the vocabulary divided over tp ranks.

Never holds more than one [N, V / tp] matrix: logits are computed, reduced, and in backward turned into their own
gradient in place. Temporaries are a few rows at a time.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24
"""Logits worked on at once."""


@dataclass(frozen=True)
class VocabShard:
    """This tp rank's part of the output matrix."""

    weight: Tensor
    """[rows, hidden], without padding; may be empty."""
    start: int
    """Token id of the first row."""
    group: dist.ProcessGroup
    """The tp ranks."""


class TokenLogprobs(NamedTuple):
    """What the distributions say of the chosen tokens; each [N] float32, equal on all tp ranks."""

    logprobs: Tensor
    entropies: Tensor | None
    """Nats; None unless asked for."""
    highest: Tensor
    """Logprobs of the likeliest tokens, without gradient: equal to `logprobs` where the greedy choice was taken."""


class _Options(NamedTuple):
    scale: float
    start: int
    group: dist.ProcessGroup
    with_entropy: bool
    keep_logits: bool


def token_logprobs(hidden: Tensor, shard: VocabShard, targets: Tensor, temperature: float,
                   with_entropy: bool) -> TokenLogprobs:
    """log softmax(hidden @ W^T / temperature) at `targets`, differentiable in hidden and W.

    Args:
        hidden: [N, hidden], equal on all tp ranks. Its gradient is this rank's share: the caller sums over tp.
        shard: this rank's rows of W.
        targets: [N] int64 token ids.
        temperature: what the sampler divided its logits by.
        with_entropy: also return the entropy of each distribution (one more pass over the logits).
    """
    keep = torch.is_grad_enabled() and (hidden.requires_grad or shard.weight.requires_grad)
    options = _Options(1.0 / temperature, shard.start, shard.group, with_entropy, keep)
    logprobs, entropies, highest = _TokenLogprobs.apply(hidden, shard.weight, targets, options)
    return TokenLogprobs(logprobs, entropies if with_entropy else None, highest)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor,
                options: _Options) -> tuple[Tensor, Tensor, Tensor]:
        rows, vocab = hidden.shape[0], weight.shape[0]
        local = targets - options.start
        mine = (local >= 0) & (local < vocab)
        local = local.clamp(0, max(0, vocab - 1))
        logits = hidden.new_empty(rows if options.keep_logits else 0, vocab)
        largest = torch.full((rows,), -torch.inf, dtype=torch.float32, device=hidden.device)
        # Rows of `sums`: sum of exp(z - max), the target's z, sum of z exp(z - max).
        sums = torch.zeros(3, rows, dtype=torch.float32, device=hidden.device)
        for part in vocab_chunks(rows, vocab):
            z = torch.mm(hidden[part], weight.t(), out=logits[part] if options.keep_logits else None).float()
            if options.scale != 1.0:
                z = z * options.scale
            largest[part] = z.amax(dim=1)
            weights = torch.exp(z - largest[part, None])
            sums[0, part] = weights.sum(dim=1)
            sums[1, part] = z.gather(1, local[part, None]).squeeze(1) * mine[part]
            if options.with_entropy:
                sums[2, part] = weights.mul_(z).sum(dim=1)
        total_exp, target, total_z = _reduce(largest, sums, options.group)
        lse = largest + total_exp.log()
        entropy = lse - total_z / total_exp if options.with_entropy else lse.new_zeros(0)
        ctx.save_for_backward(hidden, weight, local, mine, lse, entropy)
        ctx.logits, ctx.scale = logits, options.scale
        ctx.set_materialize_grads(False)
        highest = largest - lse
        ctx.mark_non_differentiable(highest)
        return target - lse, entropy, highest

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor, unused: None) -> tuple[Tensor | None, ...]:
        hidden, weight, local, mine, lse, entropy = ctx.saved_tensors
        gradient = ctx.logits
        grad_logprobs = torch.zeros_like(lse) if grad_logprobs is None else grad_logprobs
        for part in vocab_chunks(*gradient.shape):
            g, raw = grad_logprobs[part, None], gradient[part]
            log_p = (raw.float() * ctx.scale if ctx.scale != 1.0 else raw.float()).sub_(lse[part, None])
            if grad_entropy is not None:
                # dH/dz_j = -p_j (log p_j + H)
                h = grad_entropy[part, None]
                factor = log_p.add(entropy[part, None]).mul_(-h).sub_(g)
                dz = log_p.exp_().mul_(factor)
            else:
                dz = log_p.exp_().mul_(-g)
            dz.scatter_add_(1, local[part, None], g * mine[part, None])
            if ctx.scale != 1.0:
                dz.mul_(ctx.scale)
            if dz.data_ptr() != raw.data_ptr():
                raw.copy_(dz)
        grad_hidden = gradient @ weight if ctx.needs_input_grad[0] else None
        grad_weight = gradient.t() @ hidden if ctx.needs_input_grad[1] else None
        # The logits have become their gradient: a second backward would use garbage.
        ctx.logits = None
        return grad_hidden, grad_weight, None, None, None, None, None, None


def vocab_chunks(rows: int, vocab: int) -> list[slice]:
    """Rows whose logits are worked on at once."""
    if not vocab:
        return []
    step = max(1, CHUNK_ELEMENTS // vocab)
    return [slice(start, min(rows, start + step)) for start in range(0, rows, step)]


def _reduce(largest: Tensor, sums: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Bring the sums of all tp ranks to the common maximum, in place, and add them up."""
    if group.size() == 1:
        return sums
    own = largest.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    sums[0::2] *= torch.exp(own - largest)
    dist.all_reduce(sums, group=group)
    return sums
