"""The ranks of a job as torch.distributed knows them: joining, without any model-parallel library."""

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT_S = 1200.0
"""A collective that a peer does not join for so long fails: longer than the slowest replica's generation."""

PATIENCE_S = 86_400.0
"""Ranks wait so long for one that moves files: a peer's death ends such a wait, because it closes connections, and so
does the dead man's switch."""


def join_ranks(timeout_s: float = TIMEOUT_S) -> None:
    """Join the job's default process group: torchrun's environment, or alone where there is none. Twice is once.

    Args:
        timeout_s: after which a collective with a missing peer fails.
    """
    if dist.is_initialized():
        return
    timeout = timedelta(seconds=timeout_s)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(local_device())
    world_size = os.environ.get("WORLD_SIZE", "1")
    if os.environ.get("LOCAL_WORLD_SIZE", "1") == world_size:
        # All peers are on this machine: gloo and NCCL must neither resolve the host's name nor listen outside.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
        return
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def serve_store() -> dist.TCPStore:
    """Where the ranks of this machine meet, served by this process while the object lives. Torch's own store has no
    password and listens on all interfaces; another one that this process makes at the same port shares this one."""
    listener = socket.create_server(("127.0.0.1", 0))
    return dist.TCPStore(
        "127.0.0.1", listener.getsockname()[1], is_master=True, wait_for_workers=False, multi_tenant=True,
        master_listen_fd=listener.detach())


def patient_group() -> dist.ProcessGroup:
    """Another group of all ranks, to wait in while one of them moves files. Every rank calls it."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE_S))


def local_device() -> torch.device:
    """The device of this rank."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")
