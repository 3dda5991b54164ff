"""The parent of one engine job on this machine: holds its lease, keeps its log, writes how it ended.

`python -m tasks.launchers.wrapper JSON` runs in a session of its own, so it outlives the task that started it. Standard
library only. It writes job.json when it starts and exit.json when no process of the job is left.
"""

import contextlib
import ctypes
import fcntl
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from tasks.launchers.deadman import TICK_S, DeadMan, Following
from tasks.launchers.processes import Mark, identity, send

LOCK_FILE = "wrapper.lock"
GRACE_S = 1.5
"""Seconds the engine gets to end by itself; the whole kill has to fit in 5."""
STACKS_S = 1.0
"""Seconds a hung engine gets to write where its threads are."""
EXIT_FAULT = 3
EXIT_KILLED = 130
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class Stopped(BaseException):
    """SIGTERM or SIGINT arrived."""


class NoSlot(Exception):
    """Other jobs hold the slots."""


def main(config: dict[str, Any]) -> int:
    """Run one attempt of a job.

    Args:
        config: `directory`, `attempt`, `command` (argv), `slots` (files of which to hold `need`), `need`, `gpus`
            (whether slots are GPUs), `lease_limit_s`, `limits` (of `DeadMan`, and `followed_limit_s`).
    """
    directory = Path(config["directory"])
    with open(directory / LOCK_FILE, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0  # another wrapper runs this job: the submitter adopts that one
        # Orphans of the engine become children of this process, so none can hide behind a dead parent.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        started = time.time()
        write_json(directory / "job.json", describe(config, started))
        leased = True
        try:
            code, signum = run(directory, config)
        except NoSlot:
            code, signum, leased = EXIT_FAULT, None, False
        if may_write(directory, config["attempt"]):
            write_json(directory / "exit.json", {
                "code": code, "signal": signum, "attempt": config["attempt"], "leased": leased, "started": started,
                "finished": time.time()})
    return 0


def may_write(directory: Path, attempt: int) -> bool:
    """Whether no later attempt has begun: how this one ended is nobody's concern then."""
    with open(directory / "attempt") as file:
        return file.read().strip() == str(attempt)


def describe(config: dict[str, Any], started: float) -> dict[str, Any]:
    """The content of job.json."""
    return {
        "launcher": "local", **identity(os.getpid()), "pgid": os.getpgid(0), "started": started,
        "host": socket.gethostname(), "attempt": config["attempt"], "command": config["command"]}


def mark_of(directory: Path) -> Mark:
    """The processes of the job that this wrapper leads."""
    return Mark(directory, sessions=frozenset({os.getpid()}))


def run(directory: Path, config: dict[str, Any]) -> tuple[int, int | None]:
    """Wait for the lease, run the engine; returns (exit code, signal that ended it).

    Raises:
        NoSlot: there was no lease in time.
    """
    try:
        for signum in STOP_SIGNALS:
            signal.signal(signum, _stop)
        with open(directory / "log.txt", "ab", buffering=0) as log, lease(config, log) as slots:
            return run_engine(directory, config, slots, log)
    except Stopped:  # while waiting for the lease
        return EXIT_KILLED, int(signal.SIGTERM)
    finally:
        ignore_stop()


def run_engine(directory: Path, config: dict[str, Any], slots: list[int], log: IO[bytes]) -> tuple[int, int | None]:
    """Start the engine and wait for it; when this returns no process of the job is left but this one."""
    environment = dict(os.environ)
    if config["gpus"]:
        environment["CUDA_VISIBLE_DEVICES"] = visible_devices(slots, environment.get("CUDA_VISIBLE_DEVICES"))
    watch = Watch(directory, config["limits"])
    try:
        engine = subprocess.Popen(
            config["command"], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=directory,
            env=environment, preexec_fn=die_with_the_wrapper)
        watch.start()
        status = reap_until(engine.pid)
        watch.stop()
        mark_of(directory).end(grace_s=0.0)
    except Stopped:
        ignore_stop()
        mark_of(directory).end(grace_s=GRACE_S)
        return EXIT_KILLED, int(signal.SIGTERM)
    except OSError as error:
        log.write(f"error: cannot start {config['command'][0]}: {error}\n".encode())
        return EXIT_FAULT, None
    if watch.verdict:
        log.write(f"error: the engine {watch.verdict}\n".encode())
        return EXIT_FAULT, None
    if os.WIFSIGNALED(status):
        return 128 + os.WTERMSIG(status), os.WTERMSIG(status)
    return os.WEXITSTATUS(status), None


def visible_devices(slots: list[int], allowed: str | None) -> str:
    """CUDA_VISIBLE_DEVICES of a job that holds these slots: of the devices that this process may see, if not all."""
    devices = [name.strip() for name in allowed.split(",")] if allowed else None
    return ",".join(devices[slot] if devices else str(slot) for slot in slots)


def die_with_the_wrapper() -> None:
    """In the engine, before it starts: a wrapper that is killed gives its lease back, so nothing may run on."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class Watch(threading.Thread):
    """Ends an engine that hangs, or that nobody waits for: it would hold its lease, and a task would wait, for ever."""

    def __init__(self, directory: Path, limits: dict[str, Any]):
        super().__init__(name="watch", daemon=True)
        self.verdict: str | None = None
        """Why the engine was ended."""
        self._directory = directory
        self._tick_s = limits.get("tick_s", TICK_S)
        self._following = Following(directory / "followed", limit_s=limits.pop("followed_limit_s"), tick_s=self._tick_s)
        self._deadman = DeadMan(directory / "heartbeat", **limits)
        self._over = threading.Event()

    def run(self) -> None:
        """Look until the engine has ended or hangs."""
        while not self._over.wait(self._tick_s):
            late, left = self._deadman.look(), self._following.look()
            if late or left:
                self.verdict = f"hung and was ended: {late}" if late else f"was ended: {left}"
                if late and self._deadman.pid is not None:
                    # The engine then writes the stacks of all its threads: where it hangs.
                    send({self._deadman.pid}, signal.SIGUSR1)
                    self._over.wait(STACKS_S)
                mark_of(self._directory).end(grace_s=GRACE_S)
                return

    def stop(self) -> None:
        """The engine has ended."""
        self._over.set()
        self.join()


def reap_until(pid: int) -> int:
    """Collect dead children until `pid` is one of them; its wait status."""
    while True:
        dead, status = os.wait()
        if dead == pid:
            return status


@contextlib.contextmanager
def lease(config: dict[str, Any], log: IO[bytes]) -> Iterator[list[int]]:
    """Hold `need` of the slot files while inside; the numbers of those held. Waits, saying so in the log.

    Raises:
        NoSlot: after `lease_limit_s`; whoever waits for this job may hold what the job with the slots needs to go on.
    """
    said, deadline = False, time.monotonic() + config["lease_limit_s"]
    while True:
        with contextlib.ExitStack() as files:
            free = (number for number, path in enumerate(config["slots"]) if _lock(files, path))
            held = list(itertools.islice(free, config["need"]))
            if len(held) == config["need"]:
                yield held
                return
        # All or nothing: two jobs that each hold a part would wait for ever.
        if not said:
            event = {"event": "waiting", "slots_needed": config["need"], "slots": len(config["slots"])}
            log.write(json.dumps(event).encode() + b"\n")
            said = True
        if time.monotonic() > deadline:
            raise NoSlot
        time.sleep(0.2 + 0.2 * (os.getpid() % 8) / 8)


def _lock(files: contextlib.ExitStack, path: str) -> bool:
    file = files.enter_context(open(path, "a"))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file that a reader sees whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def ignore_stop() -> None:
    """From here on only SIGKILL interrupts: how the job ended is being written."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def _stop(signum: int, frame: object) -> None:
    raise Stopped


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
