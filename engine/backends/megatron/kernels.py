"""Elementwise parts of a layer with their own backward: fewer passes over memory than autograd's, the same numbers.

Both write the two halves of their result into one tensor, where autograd would compute them apart and concatenate.
"""

from typing import Any

import torch
from torch import Tensor


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up of [..., gate; up] (arXiv:2002.05202)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """x: [..., 2 F] -> [..., F]."""
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """silu(gate) is computed again: cheaper than keeping it."""
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, dim=-1)
        torch.mul(torch.nn.functional.silu(gate), grad, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return grad_x


class Rotate(torch.autograd.Function):
    """Rotary embedding: the pair (x_i, x_{i + D/2}) turned by its angle (arXiv:2104.09864, in the halves' order)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [T, s, heads, D]; cos, sin: [T, 1 or s, 1, D / 2]."""
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The inverse rotation."""
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, -1), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    new_first, new_second = result.chunk(2, dim=-1)
    torch.mul(first, cos, out=new_first).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=new_second).addcmul_(first, sin, value=direction)
    return result
