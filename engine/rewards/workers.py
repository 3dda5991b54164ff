"""The pool's side of the scoring processes: start the fork server, start, feed, read and kill workers."""

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import TypeAdapter

import engine
from engine.errors import FaultError
from engine.rewards.outcome import LENGTH, RECORD, Case, Outcome
from engine.spec.reward import Reward

Unit = tuple[int, int]
"""One call of a verifier: (row, index of the reward)."""
Result = tuple[int, int, Outcome, float, str]
"""Row, reward, outcome, score, message."""


class ForkServer:
    """The child process that forks workers; ends with this process, and its workers with it."""

    def __init__(self, rewards: Sequence[Reward]):
        """Starts it and returns at once; it imports what the rewards need on its own time."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # No more of the environment than Python needs: verifiers have no business with keys and tokens.
        environment = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "LANG") if name in os.environ}
        environment |= {"PYTHONPATH": str(Path(engine.__file__).parents[1]), "PYTHONHASHSEED": "0",
                        "OMP_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "engine.rewards.fork_server", str(theirs.fileno())],
                stdin=subprocess.PIPE, pass_fds=[theirs.fileno()], env=environment)
        assert self._process.stdin
        # If it is dead already, the first request for a worker says so.
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(TypeAdapter(list[Reward]).dump_json(list(rewards)))

    def start_worker(self) -> "Worker":
        """Ask for a worker; it greets when it can take work.

        Raises:
            FaultError: the fork server is dead.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            try:
                socket.send_fds(self._control, [b"worker"], [theirs.fileno()])
            except OSError:
                ours.close()
                raise FaultError(f"rewards: the scoring server died (exit {self._process.poll()}); see the log above") \
                    from None
        return Worker(ours, self)

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def kill(self, pid: int) -> None:
        """End and reap a worker, dead or alive."""
        try:
            self._control.send(str(pid).encode())
        except OSError:
            # A dead server has taken its workers with it.
            return

    def close(self) -> None:
        """End the server and all workers."""
        self._control.close()
        self._process.wait()


class Worker:
    """One connection to a scoring process. Work is fed in chunks; results come back one by one, in order."""

    def __init__(self, connection: socket.socket, server: ForkServer):
        self.connection, self._server = connection, server
        self.pid = 0
        """0 until it has greeted."""
        self.units: deque[Unit] = deque()
        """What it was given and has not answered; it works on the first."""
        self.begun = False
        """It has received them."""
        self.since = time.monotonic()
        """When the first of `units` was begun, as far as this process can know: never too early."""
        self._buffer = b""

    @property
    def idle(self) -> bool:
        """Greeted and without work."""
        return self.pid > 0 and not self.units

    def give(self, units: Sequence[Unit], cases: Mapping[int, Case]) -> None:
        """Send a chunk to an idle worker.

        Raises:
            OSError: it is dead.
        """
        self.units.extend(units)
        self.begun = False
        self.since = time.monotonic()
        work = pickle.dumps((units, cases), protocol=pickle.HIGHEST_PROTOCOL)
        self.connection.sendall(LENGTH.pack(len(work)) + work)

    def end(self) -> None:
        """Drop the connection and kill the process."""
        self.connection.close()
        if self.pid:
            self._server.kill(self.pid)

    def read(self) -> tuple[list[Result], bool]:
        """Results that have arrived, without waiting, and whether the worker is still there."""
        try:
            received = self.connection.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return [], True
        except OSError:
            return [], False
        self._buffer += received
        results = []
        while record := self._next_record():
            if record[2] is Outcome.READY:
                self.pid = int(record[3])
                continue
            self.since = time.monotonic()
            if record[2] is Outcome.BEGUN:
                self.begun = True
                continue
            expected = self.units.popleft()
            assert expected == record[:2], f"worker {self.pid} answered {record[:2]}, not {expected}"
            results.append(record)
        return results, bool(received)

    def _next_record(self) -> Result | None:
        if len(self._buffer) < RECORD.size:
            return None
        row, reward, outcome, length, score = RECORD.unpack_from(self._buffer)
        end = RECORD.size + length
        if len(self._buffer) < end:
            return None
        message = self._buffer[RECORD.size : end].decode(errors="replace")
        self._buffer = self._buffer[end:]
        return row, reward, Outcome(outcome), score, message
