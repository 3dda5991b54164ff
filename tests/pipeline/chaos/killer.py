"""Kills parts of a running pipeline at moments that a seed and the progress of its engine jobs decide."""

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.errors import FaultError
from tasks import jobs
from tasks.launchers import local
from tasks.launchers.processes import send
from tests.pipeline.airflow_stack import Airflow

COMPONENTS = ("scheduler", "api-server", "mlflow", "object-store")
TARGETS = ("rank", "wrapper", "task", *COMPONENTS, "all")
POLL_S = 0.1


@dataclass(frozen=True)
class Kill:
    """One kill: when so many more events of engine jobs were seen, and a little later."""

    target: str
    events: int
    delay_s: float


def plan(seed: int, count: int) -> list[Kill]:
    """Every target about equally often; order and moments from the seed."""
    chance = random.Random(seed)
    targets = [TARGETS[i % len(TARGETS)] for i in range(count)]
    chance.shuffle(targets)
    return [Kill(target, chance.randint(0, 3), round(chance.uniform(0.0, 2.0), 2)) for target in targets]


class Killer:
    """Carries out a plan while a run goes on. `with killer.disturbing(run_id):` for one run after the other."""

    def __init__(self, airflow: Airflow, kills: list[Kill]):
        self.airflow, self.left = airflow, list(kills)
        self.done: list[str] = []
        """One line a kill."""
        self._run_id = ""
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Killer":
        self._over.clear()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        assert self._thread is not None
        self._thread.join()

    def disturbing(self, run_id: str) -> "Killer":
        """What follows is about this run."""
        self._run_id = run_id
        return self

    def _work(self) -> None:
        seen = self.events()
        while self.left and not self._over.wait(POLL_S):
            kill = self.left[0]
            if self.events() < seen + kill.events or self._over.wait(kill.delay_s):
                continue
            # Its process may not be there just now: then at the first moment when it is.
            victims = self.victims(kill.target)
            if not victims:
                continue
            send(victims, signal.SIGKILL)
            seen = self.events()
            self.done.append(f"{self._run_id} at event {seen}: {kill.target} ({len(victims)} processes)")
            print(f"kill {len(self.done)}: {self.done[-1]}", flush=True)
            self.left.pop(0)

    def events(self) -> int:
        """Events of all engine jobs so far, and ends of their attempts."""
        count = 0
        for pattern in ("*/*/*/log.txt", "*/*/*/attempts/*/log.txt"):
            for log in (self.airflow.home / "jobs").glob(pattern):
                with contextlib.suppress(FileNotFoundError):  # moved to `attempts` just now
                    count += log.read_bytes().count(b'\n{"event"') + (log.parent / "exit.json").exists()
        return count

    def victims(self, target: str) -> set[int]:
        """Pids of what is to die now; empty when it is not there."""
        if target in COMPONENTS:
            return self._component(target)
        if target == "task":
            return self._tasks()
        wrappers, others = self._jobs()
        if target == "wrapper":
            return wrappers
        return others if target == "rank" else self.airflow.stack.processes() | wrappers | others

    def _component(self, name: str) -> set[int]:
        try:
            return {self.airflow.stack.pid_of(name)}
        except StopIteration:
            return set()  # it is dead already and not started again yet

    def _tasks(self) -> set[int]:
        try:
            tasks = self.airflow.api.tasks("train_ppo", self._run_id)
        except FaultError:
            return set()
        return {ti["pid"] for ti in tasks.values() if ti["state"] == "running" and ti["pid"]
                and Path(f"/proc/{ti['pid']}").exists()}

    def _jobs(self) -> tuple[set[int], set[int]]:
        """Wrappers of the running jobs, and the engine's own processes."""
        wrappers, others = set(), set()
        for directory in jobs.running(self.airflow.home, local):
            record = jobs.read_json(directory / "job.json")
            if record is not None:
                wrappers.add(record["pid"])
                others |= {pid for pid in local.mark_of(directory).processes() if is_engine(pid)}
        return wrappers, others - wrappers


def is_engine(pid: int) -> bool:
    """Whether a process runs `python -m engine`."""
    try:
        return b"\0engine\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def still_held(home: Path) -> Iterator[Path]:
    """Slots that somebody still holds."""
    import fcntl

    paths = list((home / "slots").rglob("*.lock"))
    assert paths, "no job held one ever"
    for path in paths:
        with open(path, "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield path


def processes_left(home: Path) -> set[int]:
    """Processes of jobs, a moment after the last one has ended."""
    deadline = time.monotonic() + 10
    while (left := {pid for record in (home / "jobs").glob("*/*/**/spec.json")
                    for pid in local.mark_of(record.parent).processes()}) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def attempts(directory: Path) -> int:
    """Attempts that a job needed."""
    return json.loads((directory / "attempt").read_text())


def chosen(name: str, default: int) -> int:
    """A number that `make chaos` may set."""
    return int(os.environ.get(name) or default)
