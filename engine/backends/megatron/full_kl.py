"""The exact KL of one model's next tokens to another's, from hidden states, the vocabulary divided over tp ranks.

Holds the logits of a few rows at a time: backward computes them again instead of keeping two [N, V / tp] matrices.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from engine.backends.megatron.logprobs import VocabShard, vocab_chunks


class NextTokens(NamedTuple):
    """N distributions softmax(hidden @ W^T / temperature)."""

    hidden: Tensor
    """[N, hidden], equal on all tp ranks."""
    shard: VocabShard
    """This rank's rows of W."""
    temperature: float


def full_kl(policy: NextTokens, reference: NextTokens) -> Tensor:
    """[N] float32 KL(policy || reference) in nats, equal on all tp ranks.

    Differentiable in the policy's hidden and W, whose gradients are this rank's share, as those of `token_logprobs`; a
    constant in the reference.

    Args: policy, reference: with the same rows of the vocabulary on each rank.
    """
    return _FullKL.apply(policy.hidden, policy.shard.weight, policy, reference)


class _FullKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, policy: NextTokens, reference: NextTokens) -> Tensor:
        rows = hidden.shape[0]
        largest = torch.full((2, rows), -torch.inf, dtype=torch.float32, device=hidden.device)
        # Rows of `sums`: sum of exp(z - max) of the policy and of the reference, sum of exp(z - max) (z - z_reference).
        sums = torch.zeros(3, rows, dtype=torch.float32, device=hidden.device)
        for part in vocab_chunks(rows, weight.shape[0]):
            z, z_reference = _logits(policy, part), _logits(reference, part)
            largest[0, part], largest[1, part] = z.amax(dim=1), z_reference.amax(dim=1)
            sums[1, part] = torch.exp(z_reference - largest[1, part, None]).sum(dim=1)
            weights = torch.exp(z - largest[0, part, None])
            sums[0, part] = weights.sum(dim=1)
            sums[2, part] = weights.mul_(z.sub_(z_reference)).sum(dim=1)
        group = policy.shard.group
        if group.size() > 1:
            own = largest.clone()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            sums *= torch.exp(own - largest)[[0, 1, 0]]
            dist.all_reduce(sums, group=group)
        lse = largest + sums[:2].log()
        kl = sums[2] / sums[0] - lse[0] + lse[1]
        ctx.save_for_backward(hidden, weight, lse, kl)
        ctx.policy, ctx.reference = policy, reference
        return kl

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, lse, kl = ctx.saved_tensors
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if for_hidden else None
        grad_weight = torch.zeros_like(weight) if for_weight else None
        for part in vocab_chunks(hidden.shape[0], weight.shape[0]):
            log_p = _logits(ctx.policy, part).sub_(lse[0, part, None])
            log_ratio = log_p - _logits(ctx.reference, part).sub_(lse[1, part, None])
            # dKL/dz_j = p_j (log p_j - log q_j - KL)
            dz = log_ratio.sub_(kl[part, None]).mul_(log_p.exp_()).mul_(grad[part, None] / ctx.policy.temperature)
            dz = dz.to(hidden.dtype)
            if for_hidden:
                grad_hidden[part] = dz @ weight
            if for_weight:
                grad_weight.addmm_(dz.t(), hidden[part])
        return grad_hidden, grad_weight, None, None


def _logits(model: NextTokens, part: slice) -> Tensor:
    return torch.mm(model.hidden[part].detach(), model.shard.weight.detach().t()).float().div_(model.temperature)
