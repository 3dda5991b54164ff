"""Exchange between the data-parallel ranks of a job, over torch.distributed."""

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from engine.batch import concat


class DataParallelComm:
    """Sums and gathers over one process group; values stay on the device they came from."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self._size = dist.get_world_size(group)

    def gather(self, values: Tensor) -> Tensor:
        """[b] of this rank, b may differ and may be 0 -> [N] of all ranks in their order; dtype kept."""
        if self._size == 1:
            return values
        counts = [torch.zeros(1, dtype=torch.int64, device=values.device) for _ in range(self._size)]
        dist.all_gather(counts, torch.tensor([len(values)], device=values.device), group=self._group)
        longest = max(int(count) for count in counts)
        # bool has no collective in gloo: it travels as bytes.
        carried = values.to(torch.uint8) if values.dtype == torch.bool else values
        padded = carried.new_zeros(longest)
        padded[: len(values)] = carried
        received = [torch.empty_like(padded) for _ in range(self._size)]
        dist.all_gather(received, padded, group=self._group)
        parts = [part[: int(count)] for part, count in zip(received, counts, strict=True)]
        return torch.cat(parts).to(values.dtype)

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over the ranks; shape and dtype kept."""
        total = values.clone()
        if self._size > 1:
            dist.all_reduce(total, group=self._group)
        return total

    def gather_batch(self, batch: TensorDict) -> TensorDict:
        """Rows of all ranks, in their order; a rank may have none."""
        parts: list = [None] * self._size
        dist.all_gather_object(parts, {name: value.cpu() for name, value in batch.items()}, group=self._group)
        rows = [TensorDict(fields, batch_size=[len(fields["sample_ids"])]) for fields in parts]
        return concat(rows)
