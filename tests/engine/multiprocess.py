"""Ranks for tests: gloo processes that run a function together and never hang the test.

    run_ranks(check, 2, tmp_path)                 # fresh processes, the results of all ranks
    with Ranks(4) as ranks: ranks.run(check, ...) # one start, many checks
    shared_ranks(2).run(check, ...)               # one start for the whole test session

`check` must be a module-level function. It runs with torchrun's environment set (RANK, WORLD_SIZE, ...) and may start
process groups itself, for example with `start_world`.
"""

import atexit
import ctypes
import gc
import multiprocessing as mp
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from torch.distributed import TCPStore

from engine.ranks import serve_store

PR_SET_PDEATHSIG = 1
START_TIMEOUT_S = 120.0


class RankFailed(AssertionError):
    """A rank raised, died or ran out of time; holds its traceback."""


class Ranks:
    """`world_size` processes that wait for functions to run together."""

    def __init__(self, world_size: int, shared: bool = False):
        """Args: shared: after each function its process groups are destroyed; not for vLLM, which keeps them."""
        self.world_size = world_size
        self.shared = shared
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._store: TCPStore | None = None

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()

    def run(self, function: Callable, *args: Any, timeout_s: float = 120.0) -> list[Any]:
        """Call `function(*args)` on every rank and return what each returned, by rank.

        Raises:
            RankFailed: the first failure, with its traceback. All ranks are killed then; the next run starts new ones.
        """
        if not self._processes:
            self._start()
            timeout_s += START_TIMEOUT_S
        for pipe in self._pipes:
            pipe.send((function, args))
        try:
            return self._collect(time.monotonic() + timeout_s, function.__name__)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kill the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._store = [], [], None

    def _start(self) -> None:
        context = mp.get_context("spawn")
        # Served from here, as torchrun does, so that nobody takes the port before rank 0 is up.
        self._store = serve_store()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.world_size, self._store.port, theirs, self.shared),
                name=f"rank-{rank}", daemon=False)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self, deadline: float, name: str) -> list[Any]:
        results: dict[int, Any] = {}
        while len(results) < self.world_size:
            waiting = {self._pipes[rank]: rank for rank in range(self.world_size) if rank not in results}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = sorted(waiting.values())
                raise RankFailed(f"{name}: ranks {late} of {self.world_size} did not finish in time")
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    done, value = pipe.recv()
                except EOFError:
                    self._processes[rank].join(timeout=5)
                    raise RankFailed(f"{name}: rank {rank} died, exit code {self._processes[rank].exitcode}") from None
                if not done:
                    raise RankFailed(f"{name}: rank {rank} of {self.world_size} failed:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(self.world_size)]


def run_ranks(function: Callable, world_size: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Run `function(*args)` on fresh ranks and return what each returned, by rank.

    Raises:
        RankFailed: the first failure, with its traceback.
    """
    with Ranks(world_size) as ranks:
        return ranks.run(function, *args, timeout_s=timeout_s)


_SHARED: dict[int, Ranks] = {}


def shared_ranks(world_size: int) -> Ranks:
    """Ranks that live until the test session ends: importing torch and Megatron is paid once.

    Only for functions that leave nothing behind but process groups.
    """
    if world_size not in _SHARED:
        _SHARED[world_size] = Ranks(world_size, shared=True)
        atexit.register(_SHARED[world_size].stop)
    return _SHARED[world_size]


def _serve(rank: int, world_size: int, port: int, pipe: Connection, shared: bool) -> None:
    # A killed pytest must leave no ranks behind.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True",
        OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((True, function(*args)))
        except BaseException:  # noqa: BLE001
            # Whatever it was, the parent has to know: peers may hang in a collective, and it kills them.
            pipe.send((False, traceback.format_exc()))
        else:
            if shared:
                _leave_groups()


def _leave_groups() -> None:
    """Destroy what groups a function made: on gloo each keeps two threads and a socket to every peer.

    Megatron only forgets its groups, so that a long session would have thousands.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    gc.collect()  # Models hold groups too.
    dist.barrier()  # A peer may still be receiving through them.
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
