"""Which processes belong to a job, and how to end them. Reads /proc; standard library only (the wrapper uses it).

A process group is not enough: torchrun starts every rank in a session of its own. A job's processes are those that carry
its directory in their environment, and the descendants of those (a library may overwrite its environment).
"""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

JOB_VARIABLE = "RATCHET_JOB_DIR"


@dataclass(frozen=True)
class Process:
    """One line of /proc."""

    pid: int
    parent: int
    state: str
    start_ticks: int
    """Clock ticks from boot to the start: with the pid, an identity that is not used twice."""


def read_process(pid: int) -> Process | None:
    """The process with this pid; None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command in parentheses may itself hold spaces and parentheses.
    fields = text[text.rindex(")") + 2:].split()
    return Process(pid=pid, state=fields[0], parent=int(fields[1]), start_ticks=int(fields[19]))


def is_running(pid: int, start_ticks: int) -> bool:
    """Whether this very process still runs: not another one with its number, not a zombie."""
    process = read_process(pid)
    return process is not None and process.start_ticks == start_ticks and process.state not in "ZX"


def processes_of(directory: Path) -> set[int]:
    """Pids of all live processes of a job, the wrapper included and the caller excluded."""
    marker = f"{JOB_VARIABLE}={directory}".encode()
    processes = {p.pid: p for p in map(read_process, _pids()) if p is not None}
    members = {pid for pid in processes if marker in _environment(pid)}
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process.pid)
    queue = list(members)
    while queue:
        found = [pid for pid in children.get(queue.pop(), []) if pid not in members]
        members.update(found)
        queue.extend(found)
    return {pid for pid in members - {os.getpid()} if processes[pid].state not in "ZX"}


def end_processes(directory: Path, *, grace_s: float, limit_s: float = 2.0) -> set[int]:
    """SIGTERM to every process of a job, SIGKILL to those left after `grace_s`.

    Args:
        directory: the job's.
        grace_s: seconds to end by themselves.
        limit_s: seconds to wait for the kernel after SIGKILL.
    Returns:
        Pids that are still there; empty unless the kernel holds one (a process in an uninterruptible wait).
    """
    send(processes_of(directory), signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while (left := processes_of(directory)) and time.monotonic() < deadline:
        time.sleep(0.05)
    deadline = time.monotonic() + limit_s
    while left and time.monotonic() < deadline:
        send(left, signal.SIGKILL)
        time.sleep(0.05)
        left = processes_of(directory)
    return left


def send(pids: set[int], signum: int) -> None:
    """Send a signal to each pid that still exists."""
    for pid in pids:
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            continue


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
