"""Masked sums, means and whitening, divided so that a sum over ranks fits in between."""

import torch
from torch import Tensor


def check_shapes(mask: Tensor, **tensors: Tensor) -> None:
    """Refuse tensors that are not of the mask's shape, and masks that are not bool.

    Raises:
        ValueError: names the tensor and both shapes.
    """
    if mask.dtype != torch.bool:
        raise ValueError(f"mask has dtype {mask.dtype}; it must be torch.bool")
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, the mask has {tuple(mask.shape)}; they must be equal")


def zero_masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` with exact zeros, and zero gradients, in masked slots: NaN times 0 would stay NaN."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Scalar sum of the unmasked values."""
    return zero_masked(values, mask).sum()


def row_sums(values: Tensor, mask: Tensor) -> Tensor:
    """[B] sums over each row's unmasked values."""
    return zero_masked(values, mask).sum(dim=1)


def row_means(values: Tensor, mask: Tensor) -> Tensor:
    """[B] means over each row's unmasked values; 0 for a row without any."""
    return row_sums(values, mask) / mask.sum(dim=1).clamp(min=1)


def moment_sums(values: Tensor, mask: Tensor) -> Tensor:
    """[3] float64: count, sum and sum of squares of the unmasked values; add them over ranks for `whiten`."""
    clean = zero_masked(values.detach(), mask).double()
    return torch.stack([mask.sum().double(), clean.sum(), clean.square().sum()])


def whiten(values: Tensor, mask: Tensor, moments: Tensor) -> Tensor:
    """Shift and scale to mean 0 and variance 1 over the whole batch.

    Args:
        values: [B, R], this rank's rows.
        mask: [B, R].
        moments: [3] from `moment_sums`, added over all ranks.
    Returns:
        [B, R], 0 in masked slots. Population variance; a batch with one value or equal values gives 0, never NaN.
    """
    count = moments[0].clamp(min=1)
    mean = moments[1] / count
    variance = (moments[2] / count - mean.square()).clamp(min=0)
    scaled = (values.double() - mean) / (variance + 1e-8).sqrt()
    return zero_masked(scaled.to(values.dtype), mask)


def nonfinite_rows(values: Tensor, mask: Tensor) -> Tensor:
    """[B] bool: the row has NaN or infinity in an unmasked slot."""
    return (~values.isfinite() & mask).any(dim=1)
