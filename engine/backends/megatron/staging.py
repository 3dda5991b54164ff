"""CPU memory that a model's state is copied to while it trains on, the same for every save."""

from collections import Counter

import torch


class Staging:
    """Copies of the save before are overwritten by those of the next.

    Copying into memory that was just asked for takes several times as long, because the system has to find and to clear
    each page first, and the training waits for the copy.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self._used: Counter[tuple[int, torch.dtype]] = Counter()

    def restart(self) -> None:
        """Give all memory out again; what was copied before must have been written."""
        self._used.clear()

    def empty(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A flat tensor [numel] whose storage no other one since `restart` shares."""
        kind = (numel, dtype)
        memory, used = self._memory.setdefault(kind, []), self._used[kind]
        if used == len(memory):
            memory.append(torch.empty(numel, dtype=dtype))
        self._used[kind] += 1
        return memory[used]

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's values, in its shape."""
        return self.empty(tensor.numel(), tensor.dtype).view(tensor.shape).copy_(tensor)
