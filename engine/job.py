"""What a stage sees of its job directory: events, progress, heartbeat, the result. Torch-free.

Every rank has a `Job`; only rank 0 writes, so stages call it without asking who they are.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from engine.fence import Fence, FencedError
from engine.spec.base import Spec
from engine.spec.job import HEARTBEAT_FILE, PROGRESS_FILE, RESULT_FILE, RunResult
from engine.store import watch_transfers, write_atomic

HEARTBEAT_S = 5.0


class Job:
    """One job directory, seen from inside the engine."""

    def __init__(self, directory: Path, rank: int = 0):
        """Args: directory: must exist; rank: of this process, 0 writes."""
        self.dir = directory
        self.rank = rank
        self._started = time.monotonic()
        self._iterations: list[float] = []
        self._moves = 0
        self.fence = Fence(directory)
        """Enter `fence.commit()` around whatever may only be written by the newest attempt."""

    def event(self, name: str, **fields: Any) -> None:
        """Print one JSON line to the log: `{"event": name, ...}`."""
        if self.rank == 0:
            line = json.dumps({"event": name, "s": round(time.monotonic() - self._started, 2), **fields})
            # In one call: unbuffered, print writes the end of a line on its own, and another thread's line between.
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    def progress(self, phase: str, iteration: int = 0, of: int = 0, **numbers: float) -> None:
        """Replace progress.json.

        Args:
            phase: what is being done: `start`, `generate`, `score`, `logprobs`, `update`, `evaluate`, ...
            iteration: iterations that are complete.
            of: iterations of this stage.
            numbers: what a person wants to see, for example `reward` and `tokens_per_s`.
        """
        self.move()
        if self.rank:
            return
        now = time.monotonic()
        if len(self._iterations) < iteration:
            self._iterations.append(now)
        eta_s = None
        if len(self._iterations) > 1:
            pace = (self._iterations[-1] - self._iterations[0]) / (len(self._iterations) - 1)
            eta_s = round(max(0.0, pace * (of - iteration) - (now - self._iterations[-1])), 1)
        write_atomic(self.dir / PROGRESS_FILE, json.dumps(
            {"phase": phase, "iteration": iteration, "of": of, "eta_s": eta_s, "time": time.time(), **numbers}))

    def move(self, *_: object) -> None:
        """Say that the work goes on; without it for the stall limit, the job counts as hung and is ended."""
        self._moves += 1

    def result(self, result: RunResult) -> None:
        """Write result.json: the last thing a stage does."""
        if self.rank == 0:
            with self.fence.commit():
                write_atomic(self.dir / RESULT_FILE, result.model_dump_json(indent=1))

    def start_heartbeat(self) -> None:
        """Write the heartbeat file every few seconds from a thread, also while Python compiles or waits.

        It beats while the process lives, so it also tells how often the main thread said that the work goes on, and
        transfers of the store did. An attempt that was replaced ends here: exit 3.
        """
        if self.rank == 0:
            watch_transfers(self.move)
            threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def _beat(self) -> None:
        step = 0
        while True:
            try:
                # No lock: whoever holds it, this process lives.
                self.fence.check()
                write_atomic(self.dir / HEARTBEAT_FILE, json.dumps(
                    {"step": step, "moves": self._moves, "monotonic_s": time.monotonic(), "time": time.time(),
                     "pid": os.getpid()}))
            except FencedError as error:
                print_error(error, None)
                os._exit(error.exit_code)
            except OSError as error:
                # A full disk is the training's to report: it must not end the heartbeat before it has.
                print(f"heartbeat: {error}", file=sys.stderr, flush=True)
            step += 1
            time.sleep(HEARTBEAT_S)


def print_error(error: BaseException, spec: Spec | None) -> None:
    """One line that says what went wrong; the last line of a failed job's log."""
    stage = getattr(spec, "stage", "engine")
    message = " ".join(str(error).split())
    sys.stderr.write(f"error: {stage}: {type(error).__name__}: {message}\n")
    sys.stderr.flush()
