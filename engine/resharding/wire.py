"""The process group of a transfer: point-to-point messages and two small agreements, each with a deadline."""

import json
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from engine.errors import ReshardError

_POLL_S = 2e-4


class Wire:
    """The ranks that take part. Ranks are those of the group; without a process group there is only this one."""

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float):
        self.timeout_s = timeout_s
        self._group = group if group is not None or not dist.is_initialized() else dist.group.WORLD
        alone = self._group is None
        self.rank = 0 if alone else dist.get_rank(self._group)
        self.size = 1 if alone else dist.get_world_size(self._group)
        # A job's group has gloo for CPU tensors beside NCCL: what travels is on the GPU wherever there is one.
        on_gpu = not alone and torch.cuda.is_available() and "nccl" in dist.get_backend_config(self._group)
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def post(self, sends: list[tuple[Tensor, int]], recvs: list[tuple[Tensor, int]]) -> list[dist.Work]:
        """Start all messages of a round; tensors must stay as they are until `wait`."""
        operations = [dist.P2POp(dist.irecv, tensor, group=self._group, group_peer=peer) for tensor, peer in recvs]
        operations += [dist.P2POp(dist.isend, tensor, group=self._group, group_peer=peer) for tensor, peer in sends]
        return dist.batch_isend_irecv(operations) if operations else []

    def wait(self, work: dist.Work, deadline: float) -> None:
        """Return when the operation is complete.

        Raises:
            RuntimeError: the peer is gone, or time.monotonic() has passed `deadline`.
        """
        remaining = deadline - time.monotonic()
        if self.device.type == "cpu":
            work.wait(timedelta(seconds=max(remaining, 0.001)))
            return
        # NCCL's wait only orders streams; the host must see completion or the deadline.
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError(f"no completion within {self.timeout_s:g} s")
            time.sleep(_POLL_S)
        work.wait()

    def gather(self, facts: dict) -> list[dict]:
        """Every rank's facts (JSON), by rank.

        Raises:
            ReshardError: a rank did not answer in time.
        """
        if self.size == 1:
            return [facts]
        own = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8).to(self.device)
        length = torch.tensor([len(own)], device=self.device)
        lengths = [torch.empty_like(length) for _ in range(self.size)]
        self._collective("exchange of layouts", dist.all_gather, lengths, length)
        longest = int(max(lengths))
        padded = torch.zeros(longest, dtype=torch.uint8, device=self.device)
        padded[:len(own)] = own
        texts = [torch.empty_like(padded) for _ in range(self.size)]
        self._collective("exchange of layouts", dist.all_gather, texts, padded)
        return [json.loads(bytes(text[:int(size)].tolist())) for text, size in zip(texts, lengths, strict=True)]

    def agree(self, what: str) -> None:
        """Return once every rank has said that it is done with `what`.

        Raises:
            ReshardError: a rank is gone or did not say so in time.
        """
        if self.size > 1:
            self._collective(what, dist.all_reduce, torch.ones(1, device=self.device))

    def _collective(self, what: str, operation, *tensors) -> None:
        try:
            work = operation(*tensors, group=self._group, async_op=True)
            self.wait(work, time.monotonic() + self.timeout_s)
        except RuntimeError as error:
            raise ReshardError(f"rank {self.rank}: {what} among {self.size} ranks did not complete within "
                               f"{self.timeout_s:g} s; a rank is gone or stuck ({first_line(error)})") from error


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return (str(error).splitlines() or [type(error).__name__])[0]
