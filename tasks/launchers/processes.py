"""Which processes belong to a job, and how to end them. Reads /proc; standard library only (the wrapper uses it).

A process group is not enough: torchrun starts every rank in a session of its own. A job's processes are those that
carry its directory in their environment, those in the session of its first process (a program may overwrite its
environment to set its title), and the descendants of both.
"""

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JOB_VARIABLE = "RATCHET_JOB_DIR"


@dataclass(frozen=True)
class Process:
    """One line of /proc."""

    pid: int
    parent: int
    session: int
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
    return Process(pid=pid, state=fields[0], parent=int(fields[1]), session=int(fields[3]), start_ticks=int(fields[19]))


def is_running(record: Mapping[str, Any]) -> bool:
    """Whether the process of an `identity` still runs: not another one with its number, not a zombie."""
    process = read_process(record["pid"])
    return (process is not None and process.start_ticks == record["start_ticks"] and process.state not in "ZX"
            and record["boot"] == boot_id())


def boot_id() -> str:
    """Changes when the machine starts: pids and ticks of another boot mean nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identity(pid: int) -> dict[str, Any]:
    """What it needs to know a process again: `pid`, `start_ticks`, `boot`."""
    process = read_process(pid)
    assert process is not None, f"process {pid} is gone"
    return {"pid": pid, "start_ticks": process.start_ticks, "boot": boot_id()}


def session_of(record: Mapping[str, Any], directory: Path) -> set[int]:
    """The session that the process of an `identity` led; none when its number is another's now.

    While the session lasts nobody else gets its number. When it is over, a daemon may get it and leave a session of
    that number behind: a dead leader's session counts if one of its processes works in the directory. The environment
    is not asked, which a program may have overwritten with its title.
    """
    leader = read_process(record["pid"])
    if record["boot"] != boot_id() or (leader is not None and leader.start_ticks != record["start_ticks"]):
        return set()
    if leader is None and not any(
            process is not None and process.session == record["pid"] and _works_in(directory, process.pid)
            for process in map(read_process, _pids())):
        return set()
    return {record["pid"]}


@dataclass(frozen=True)
class Mark:
    """How to recognise the processes of one job or one stack."""

    directory: Path
    variable: str | None = JOB_VARIABLE
    """Environment variable that holds the directory; None: only `sessions` count."""
    sessions: frozenset[int] = frozenset()
    """Sessions that belong to it."""
    spared: str | None = None
    """Environment variable of processes that do not belong to it, nor what descends from them, whoever started them."""

    def processes(self) -> set[int]:
        """Pids of all live processes, the caller excluded."""
        marker = f"{self.variable}={self.directory}".encode() if self.variable else None
        processes = {p.pid: p for p in map(read_process, _pids()) if p is not None and not self._spares(p.pid)}
        members = {pid for pid, p in processes.items() if p.session in self.sessions
                   or (marker and marker in _environment(pid))}
        children: dict[int, list[int]] = {}
        for process in processes.values():
            children.setdefault(process.parent, []).append(process.pid)
        queue = list(members)
        while queue:
            found = [pid for pid in children.get(queue.pop(), []) if pid not in members]
            members.update(found)
            queue.extend(found)
        return {pid for pid in members - {os.getpid()} if processes[pid].state not in "ZX"}

    def end(self, *, grace_s: float, limit_s: float = 2.0) -> set[int]:
        """SIGTERM to every process, SIGKILL to those left after `grace_s`.

        Args:
            grace_s: seconds to end by themselves.
            limit_s: seconds to wait for the kernel after SIGKILL.
        Returns:
            Pids that are still there; empty unless the kernel holds one (a process in an uninterruptible wait).
        """
        send(self.processes(), signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.kill(limit_s=limit_s)

    def kill(self, *, limit_s: float = 2.0) -> set[int]:
        """SIGKILL to every process, without a word to any of them before.

        Args and returns: as of `end`.
        """
        deadline = time.monotonic() + limit_s
        while (left := self.processes()) and time.monotonic() < deadline:
            send(left, signal.SIGKILL)
            time.sleep(0.05)
        return left

    def _spares(self, pid: int) -> bool:
        prefix = f"{self.spared}=".encode()
        return self.spared is not None and any(entry.startswith(prefix) for entry in _environment(pid))


def send(pids: set[int], signum: int) -> None:
    """Send a signal to each pid that still exists and is ours to end."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _works_in(directory: Path, pid: int) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/cwd") == os.path.realpath(directory)
    except OSError:
        return False
