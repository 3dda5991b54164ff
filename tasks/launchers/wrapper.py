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
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from tasks.launchers.processes import Mark, identity

LOCK_FILE = "wrapper.lock"
GRACE_S = 1.5
"""Seconds the engine gets to end by itself; the whole kill has to fit in 5."""
EXIT_FAULT = 3
EXIT_KILLED = 130
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
PR_SET_CHILD_SUBREAPER = 36


class Stopped(BaseException):
    """SIGTERM or SIGINT arrived."""


def main(config: dict[str, Any]) -> int:
    """Run one attempt of a job.

    Args:
        config: `directory`, `attempt`, `command` (argv), `slots` (files of which to hold `need`), `need`, `gpus`
            (whether slots are GPUs).
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
        code, signum = run(directory, config)
        write_json(directory / "exit.json", {
            "code": code, "signal": signum, "attempt": config["attempt"], "started": started, "finished": time.time()})
    return 0


def describe(config: dict[str, Any], started: float) -> dict[str, Any]:
    """The content of job.json."""
    return {
        "launcher": "local", **identity(os.getpid()), "pgid": os.getpgid(0), "started": started,
        "host": socket.gethostname(), "attempt": config["attempt"], "command": config["command"]}


def mark_of(directory: Path) -> Mark:
    """The processes of the job that this wrapper leads."""
    return Mark(directory, sessions=frozenset({os.getpid()}))


def run(directory: Path, config: dict[str, Any]) -> tuple[int, int | None]:
    """Wait for the lease, run the engine; returns (exit code, signal that ended it)."""
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
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, slots))
    try:
        engine = subprocess.Popen(
            config["command"], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=directory,
            env=environment)
        status = reap_until(engine.pid)
        mark_of(directory).end(grace_s=0.0)
    except Stopped:
        ignore_stop()
        mark_of(directory).end(grace_s=GRACE_S)
        return EXIT_KILLED, int(signal.SIGTERM)
    except OSError as error:
        log.write(f"error: cannot start {config['command'][0]}: {error}\n".encode())
        return EXIT_FAULT, None
    if os.WIFSIGNALED(status):
        return 128 + os.WTERMSIG(status), os.WTERMSIG(status)
    return os.WEXITSTATUS(status), None


def reap_until(pid: int) -> int:
    """Collect dead children until `pid` is one of them; its wait status."""
    while True:
        dead, status = os.wait()
        if dead == pid:
            return status


@contextlib.contextmanager
def lease(config: dict[str, Any], log: IO[bytes]) -> Iterator[list[int]]:
    """Hold `need` of the slot files while inside; the numbers of those held. Waits, saying so in the log."""
    said = False
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
