"""The process that imports the verifiers once and forks scoring workers: `python -m engine.rewards.fork_server FD`.

A worker that is killed or dies is replaced in milliseconds, because a fork inherits all imports. A plain fork of the
trainer would inherit its locks, threads and gigabytes; `multiprocessing`'s own fork server would import the trainer's
main module into every worker. Workers score in their main thread, where verifiers may use SIGALRM.
"""

import ctypes
import math
import os
import pickle
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping

from pydantic import TypeAdapter

from engine.rewards.functions import reward_function
from engine.rewards.outcome import LENGTH, MAX_MESSAGE_BYTES, RECORD, Case, Outcome, Verdict
from engine.spec.reward import JudgeReward, Reward

WORKER_MEMORY_BYTES = 4 << 30
"""Address space of a worker: a verifier that allocates without end gets a MemoryError, not the machine."""
PR_SET_PDEATHSIG = 1


def main(control: socket.socket) -> None:
    """Fork a worker for each socket that arrives, kill and reap the one whose pid arrives, end at end of file."""
    rewards = TypeAdapter(list[Reward]).validate_json(sys.stdin.buffer.read())
    # What a verifier prints must not end up between the JSON lines of the job's log.
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(0, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    functions = {index: reward_function(reward) for index, reward in enumerate(rewards)
                 if not isinstance(reward, JudgeReward)}
    # Not reaped before the pool says so: until then the kernel gives the pid to nobody else.
    children: set[int] = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 64, 1)
        if not message:
            break
        if not descriptors:
            _kill(children, int(message))
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            _run_worker(socket.socket(fileno=descriptors[0]), functions)
        os.close(descriptors[0])
        children.add(pid)
    for pid in list(children):
        _kill(children, pid)


def _kill(children: set[int], pid: int) -> None:
    if pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        children.remove(pid)


def _run_worker(connection: socket.socket, functions: Mapping[int, Callable[[Case], Verdict]]) -> None:
    """Serve until end of file; never returns into the fork server's code."""
    try:
        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            resource.setrlimit(resource.RLIMIT_AS, (WORKER_MEMORY_BYTES, WORKER_MEMORY_BYTES))
            _serve(connection, functions)
    except OSError:
        # The pool is gone or closed the connection; there is nobody to tell.
        os._exit(0)
    finally:
        os._exit(1)


def _serve(connection: socket.socket, functions: Mapping[int, Callable[[Case], Verdict]]) -> None:
    reader = connection.makefile("rb")
    connection.sendall(RECORD.pack(0, 0, Outcome.READY, 0, os.getpid()))
    while header := reader.read(LENGTH.size):
        # Bytes of our own parent over a private socket.
        units, cases = pickle.loads(reader.read(*LENGTH.unpack(header)))  # noqa: S301
        connection.sendall(RECORD.pack(0, 0, Outcome.BEGUN, 0, 0.0))
        for row, reward in units:
            outcome, score, message = evaluate(functions[reward], cases[row])
            text = message.encode(errors="replace")[:MAX_MESSAGE_BYTES]
            connection.sendall(RECORD.pack(row, reward, outcome, len(text), score) + text)


def evaluate(function: Callable[[Case], Verdict], case: Case) -> tuple[Outcome, float, str]:
    """Score one case; whatever the function raises becomes an outcome."""
    try:
        verdict = function(case)
        if not math.isfinite(verdict.score):
            return Outcome.ERROR, 0.0, f"the verifier returned {verdict.score}"
    # SystemExit: verifiers are foreign code on arbitrary text.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return Outcome.ERROR, 0.0, f"{type(error).__name__}: {' '.join(str(error).split())}"
    return (Outcome.FORMAT_ERROR if verdict.format_error else Outcome.SCORED), float(verdict.score), ""


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
