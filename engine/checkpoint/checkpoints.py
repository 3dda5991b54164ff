"""Checkpoints of a job's ranks: saved beside the training, loaded by all. Their files: `engine.checkpoint.files`.

A save has two halves. `save` copies the state to CPU memory, which is all that the training waits for. A thread writes
it: every rank its own files, then the first rank the rest and the commit. The threads agree over a process group of
their own, so they never meet the training's collectives; what they find out is told by the next `poll`.
"""

import copy
import io
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from engine.backends.megatron.parallel import World
from engine.checkpoint.files import STATE, CheckpointFiles, in_use, name_of
from engine.checkpoint.rng import rng_state, set_rng_state
from engine.errors import FaultError, MissingError, RefusedError, StoreError
from engine.ranks import patient_group


class Snapshot(Protocol):
    """A role's state, copied. Its methods run in a thread and call no collectives."""

    def write(self) -> Any:
        """Write this rank's files; what `seal` needs of every rank."""

    def seal(self, written: list[Any]) -> None:
        """Write what belongs to all ranks; on the first rank, after `write` on all."""


class Saveable(Protocol):
    """A role's model. Every rank calls both methods."""

    def snapshot(self, directory: Path) -> Snapshot:
        """Copy the state, to be written into an empty directory that all ranks share."""

    def load(self, directory: Path) -> None:
        """Read what a snapshot wrote."""


class Checkpoints:
    """Saves and loads; every rank calls every method, and either all ranks raise or none."""

    def __init__(self, files: CheckpointFiles, world: World, saved: Callable[[int, float, float], None] | None = None):
        """Args:
            files: where they are.
            world: the rank's place.
            saved: called on the first rank, in the thread, when a checkpoint is there: its step, the seconds that its
                save kept the training, the seconds that it took altogether.
        """
        self.files, self.world = files, world
        self._saved = saved or (lambda step, blocked_s, whole_s: None)
        self.step: int | None = None
        """Of the newest checkpoint in `files`, saved or loaded by this object."""
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._group: Any = None

    def save(self, step: int, roles: Mapping[str, Saveable], state: dict[str, Any],
             metrics: Mapping[str, float] | None = None) -> Path:
        """Copy the state and begin to write it; `step-000120/` exists when `wait` returns.

        A save that is still being written is waited for.

        Args:
            step: policy version; a checkpoint of the same step is replaced.
            roles: what to save, by directory name.
            state: plain JSON, given back by `load`.
            metrics: of this step; the one that decides the best checkpoint must be among them.
        Returns:
            The path that the checkpoint will have.
        Raises:
            SpecError: no such metric.
            StoreError: this save could not begin, or the one before failed; earlier checkpoints are as before.
        """
        begin = time.monotonic()
        self.files.check_metrics(dict(metrics or {}))
        self.wait()
        saving = Path(self._on_first_rank(lambda: str(self.files.prepare(step, [*roles, "rng"]))))
        snapshots = {name: role.snapshot(saving / name) for name, role in roles.items()}
        about = {"step": step, "layout": str(self.world.layout), "roles": sorted(roles), "metrics": self._best(metrics)}
        rng, kept = _as_bytes(rng_state()), copy.deepcopy(state)
        job = _Job(saving, snapshots, rng, about, kept, begin, blocked_s=time.monotonic() - begin)
        self._thread = threading.Thread(target=self._write, args=(job,), name="checkpoint")
        self._thread.start()
        self.step = step
        return self.files.directory / name_of(step)

    def poll(self) -> None:
        """Between two iterations: raise if the save that runs beside them has failed.

        Raises:
            StoreError: what it failed with.
        """
        if self._thread is None:
            return
        done = [not self._thread.is_alive()]
        dist.broadcast_object_list(done, src=0)
        if done[0]:
            self.wait()

    def wait(self) -> None:
        """Return when nothing is being written any more.

        Raises:
            StoreError: the last save failed.
        """
        self._join()
        failure, self._failure = self._failure, None
        if failure is not None:
            self.step = None
            raise failure

    def close(self) -> None:
        """Wait as `wait` does, on the way out for another reason: a failure is a warning."""
        self._join()
        if self._failure is not None and self.world.rank == 0:
            self.files.warn(f"the last checkpoint was not saved: {self._failure}")

    def load(self, roles: Mapping[str, Saveable], directory: str | Path | None = None) -> dict[str, Any] | None:
        """Load the newest whole checkpoint; None when there is none.

        Random states are restored only under the layout they were saved under; another layout keeps the job's own.

        Args:
            roles: what to load; each must have been saved.
            directory: another run's checkpoint directory, or one `step-...` in it; None: this run's.
        Returns:
            The state given to `save`.
        Raises:
            MissingError: a `directory` was named and has no whole checkpoint.
            StoreError: the checkpoint does not hold a role, or the store does not answer.
        """
        self.wait()
        found = self._on_first_rank(lambda: self._find(directory))
        if found is None:
            if directory is not None:
                raise MissingError(f"checkpoint {directory}: no whole checkpoint there")
            return None
        checkpoint, manifest = Path(found[0]), found[1]
        with in_use(checkpoint):
            for name, role in roles.items():
                if name not in manifest["roles"]:
                    raise StoreError(f"checkpoint {checkpoint}: holds {manifest['roles']}, not {name!r}")
                role.load(checkpoint / name)
            if manifest["layout"] == str(self.world.layout):
                path = checkpoint / "rng" / f"rank-{self.world.rank:05d}.pt"
                set_rng_state(torch.load(path, weights_only=True))
            state = json.loads((checkpoint / STATE).read_text())
        self.step = manifest["step"] if directory is None else None
        return state

    def complete(self) -> None:
        """Do for the loaded checkpoint what a kill may have kept its commit from: the note of the best, the upload.

        Raises:
            StoreError: the store refused.
        """
        self._on_first_rank(lambda: self.files.complete(self.step))

    def _find(self, directory: str | Path | None) -> tuple[str, dict[str, Any]] | None:
        found = self.files.find(directory)
        return found and (str(found[0]), found[1])

    def _best(self, metrics: Mapping[str, float] | None) -> dict[str, float]:
        best = self.files.keep_best
        return {best.metric: float((metrics or {})[best.metric])} if best else {}

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, job: "_Job") -> None:
        try:
            written = self._on_every_rank(lambda: job.write(self.world.rank))
            self._on_first_rank(lambda: self._commit(job, written))
        except BaseException as error:  # noqa: BLE001
            # A thread cannot raise: the training's next `poll` or `wait` does.
            self._failure = error

    def _commit(self, job: "_Job", written: list[dict[str, Any]]) -> None:
        for name, snapshot in job.snapshots.items():
            snapshot.seal([rank[name] for rank in written])
        self.files.commit(job.saving, job.about, job.state)
        self._saved(job.about["step"], job.blocked_s, time.monotonic() - job.begin)

    def _on_first_rank(self, action: Callable[[], Any]) -> Any:
        """Run `action` on rank 0; its result, or its failure, reaches all ranks.

        In the thread, or in the main thread while there is none.
        """
        if self._group is None:
            self._group = patient_group()
        outcome: list[Any] = [None, None]
        if self.world.rank == 0:
            outcome = _attempt(action)
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        if outcome[1]:
            raise outcome[1]
        return outcome[0]

    def _on_every_rank(self, action: Callable[[], Any]) -> list[Any]:
        """Run `action` on all ranks, in the thread; all results, or the first failure on every rank."""
        outcomes: list[Any] = [None] * self.world.size
        dist.all_gather_object(outcomes, _attempt(action), group=self._group)
        failures = [failure for _, failure in outcomes if failure]
        if failures:
            raise failures[0]
        return [result for result, _ in outcomes]


@dataclass(frozen=True)
class _Job:
    """What one rank's thread has to write; nothing of it changes while the training goes on."""

    saving: Path
    snapshots: Mapping[str, Snapshot]
    rng: bytes
    about: dict[str, Any]
    state: dict[str, Any]
    begin: float
    """By the monotonic clock."""
    blocked_s: float

    def write(self, rank: int) -> dict[str, Any]:
        """This rank's files; what each role's `seal` needs."""
        written = {name: snapshot.write() for name, snapshot in self.snapshots.items()}
        with open(self.saving / "rng" / f"rank-{rank:05d}.pt", "wb") as file:
            file.write(self.rng)
        return written


def _attempt(action: Callable[[], Any]) -> list[Any]:
    """[result, None] or [None, an error of ours]: peers wait for the outcome, whatever it is."""
    try:
        return [action(), None]
    except (FaultError, RefusedError) as error:
        return [None, error]
    except OSError as error:
        return [None, StoreError(f"checkpoint {error.filename or ''}: {error.strerror or error}")]
    except Exception as error:  # noqa: BLE001
        return [None, StoreError(f"checkpoint: {type(error).__name__}: {error}")]


def _as_bytes(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()
