"""The checkpoints of a run as files in one directory: commit, find, retain. Used by the first rank alone.

    step-000120/          exists only whole: written as .saving-..., sealed by manifest.json, synced, renamed
      actor/ critic/      Megatron distributed checkpoints
      rng/rank-00000.pt   random states of every rank
      state.json          data cursor, algorithm state, policy version, ... of the caller
      manifest.json       size and sha256 of every other file
    latest.json           names the newest; moves after the rename
    best.json             names the best by a metric, when one is asked for

A directory without a valid manifest does not exist: reading falls back to the newest that has one.
"""

import contextlib
import fcntl
import json
import logging
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.manifest import read_manifest, write_manifest
from engine.checkpoint.mirror import Mirror
from engine.errors import CorruptError, MissingError, SpecError
from engine.spec.train import KeepBest
from engine.store import MANIFEST, is_s3, sync_directory, write_atomic

LATEST = "latest.json"
BEST = "best.json"
STATE = "state.json"
_SAVING = ".saving-"
_REPLACED = ".replaced-"

log = logging.getLogger(__name__)


@dataclass
class CheckpointFiles:
    """One directory of checkpoints."""

    directory: Path
    """On a disk that all ranks share; it is made when something is saved."""
    keep_last: int = 2
    """Newest checkpoints to keep, whichever attempt wrote them; older ones go after a commit."""
    keep_best: KeepBest | None = None
    """Keep the best one too."""
    mirror: Mirror | None = None
    """A copy in an object store; it is what other jobs see."""
    guard: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    """Held while names move; raises when this process may not write any more."""
    warn: Callable[[str], None] = log.warning
    """Called with one line when a checkpoint could not be used."""

    def prepare(self, step: int, parts: list[str]) -> Path:
        """An empty directory of this save's own, with a folder a part; leftovers of killed saves go."""
        # Another name each time: what an attempt that was replaced still writes lands beside, not in between.
        saving = self._temporary(name_of(step))
        with self.guard():
            self._recover()
            for leftover in self.directory.glob(f"{_SAVING}*"):
                shutil.rmtree(leftover)
            for leftover in (path for name in (LATEST, BEST) for path in self.directory.glob(f".{name}.*")):
                leftover.unlink()
            for part in parts:
                (saving / part).mkdir(parents=True)
        return saving

    def check_metrics(self, metrics: dict[str, float]) -> None:
        """Raises: SpecError: the metric that decides the best checkpoint is not measured."""
        if self.keep_best is not None and self.keep_best.metric not in metrics:
            raise SpecError(f"keep_best.metric: {self.keep_best.metric!r} is not measured; "
                            f"there are {', '.join(sorted(metrics)) or 'none'}")

    def commit(self, saving: Path, about: dict[str, Any], state: dict[str, Any]) -> Path:
        """Seal what stands in `saving`, give it its name, move latest.json, remove what is too old; then the mirror.

        Args:
            saving: a directory of `prepare`, filled.
            about: for the manifest; holds `step` and `metrics`.
            state: plain JSON of the caller.
        """
        final = self.directory / name_of(about["step"])
        write_atomic(saving / STATE, json.dumps(state, indent=1))
        write_manifest(saving, about)
        replaced = self.directory / (_REPLACED + final.name)
        with self.guard():
            if final.exists():
                with _unused(final, wait=True):
                    os.rename(final, replaced)
            os.rename(saving, final)
            sync_directory(self.directory)
            self._note(final.name, about)
            doomed = self._doom(final)
        for path in doomed:
            shutil.rmtree(path, ignore_errors=True)  # what is left goes with the next save
        self._upload(final)
        if self.mirror is not None:
            self.mirror.retain(self._kept(final), self.guard)
        return final

    def complete(self, step: int) -> None:
        """Do for a checkpoint that is there what a kill may have kept its commit from: the notes, the upload."""
        final = self.directory / name_of(step)
        with self.guard():
            self._note(final.name, json.loads((final / MANIFEST).read_text()))
        self._upload(final)

    def find(self, source: Path | str | None = None) -> tuple[Path, dict[str, Any]] | None:
        """The newest whole checkpoint and its manifest; warns about each that is not whole.

        Args: source: another directory of checkpoints, or one checkpoint in it, a path or `s3://`; None: this one.
        """
        if source is None:
            with self.guard():
                self._recover()
            if self.mirror and self.keep_best:
                self.mirror.fetch_note(self.directory / BEST)
        directory, mirror = self._place(source)
        if directory.name.startswith("step-"):
            names = [directory.name]
            directory = directory.parent
        else:
            names = _names(directory) | set(mirror.names() if mirror else ())
            self._look_at_latest(directory, names)
        for name in sorted(names, key=step_of, reverse=True):
            try:
                return directory / name, self._manifest(directory / name, mirror)
            except (ValueError, CorruptError, MissingError) as error:
                self.warn(f"checkpoint {directory / name} is not whole: {error}; taking the one before")
        return None

    @property
    def best(self) -> str | None:
        """Name of the best checkpoint; None when there is none, here or in the mirror."""
        content = _read(self.directory / BEST)
        if content is None or not (self.mirror or (self.directory / content["checkpoint"]).exists()):
            return None
        return content["checkpoint"]

    def _place(self, source: Path | str | None) -> tuple[Path, Mirror | None]:
        """The local directory of a source, and where else its checkpoints are."""
        if source is None:
            return self.directory, self.mirror
        if not is_s3(source):
            return Path(source), None
        prefix, _, name = str(source).rstrip("/").rpartition("/")
        fetched = self.directory.with_name("resumed")
        return (fetched / name, Mirror(prefix)) if name.startswith("step-") else (fetched, Mirror(str(source)))

    def _manifest(self, path: Path, mirror: Mirror | None) -> dict[str, Any]:
        try:
            return read_manifest(path)
        except ValueError:
            if mirror is None or path.name not in mirror.names():
                raise
        fetched = path.with_name(self._temporary(path.name).name)
        mirror.fetch(path.name, fetched)
        with self.guard():
            shutil.rmtree(path, ignore_errors=True)
            os.rename(fetched, path)
        return read_manifest(path)

    def _temporary(self, name: str) -> Path:
        return self.directory / f"{_SAVING}{name}-{secrets.token_hex(4)}"

    def _recover(self) -> None:
        """Undo a commit that was killed between its two renames."""
        for replaced in self.directory.glob(f"{_REPLACED}*"):
            final = self.directory / replaced.name.removeprefix(_REPLACED)
            if final.exists():
                shutil.rmtree(replaced)
            else:
                os.rename(replaced, final)

    def _look_at_latest(self, directory: Path, names: set[str]) -> None:
        try:
            named = str(json.loads((directory / LATEST).read_text())["checkpoint"])
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.warn(f"checkpoint {directory / LATEST} cannot be read ({error}); taking the newest whole one")
            return
        if named not in names:
            self.warn(f"checkpoint {directory / named}: {LATEST} names it but it is not there; "
                      "taking the newest whole one")

    def _note(self, name: str, about: dict[str, Any]) -> None:
        """Let latest.json name a checkpoint, and best.json if it is the best."""
        write_atomic(self.directory / LATEST, json.dumps({"checkpoint": name, "step": about["step"]}))
        if self.keep_best is None:
            return
        value = about["metrics"][self.keep_best.metric]
        before = _read(self.directory / BEST) if self.best not in (None, name) else None
        if before is not None and not self.keep_best.is_better(value, before["value"]):
            return
        if not math.isnan(value):
            write_atomic(self.directory / BEST, json.dumps(
                {"checkpoint": name, "step": about["step"], "metric": self.keep_best.metric, "value": value}))

    def _kept(self, newest: Path) -> set[str]:
        """Names to keep; not those after the newest: a run that went back has left them behind."""
        by_age = sorted(_names(self.directory), key=step_of, reverse=True)
        kept = {newest.name, *[name for name in by_age if step_of(name) <= step_of(newest.name)][: self.keep_last]}
        return kept | ({self.best} - {None} if self.keep_best else set())

    def _doom(self, newest: Path) -> list[Path]:
        """Give what is replaced or not kept temporary names: a removal that is interrupted leaves no half a checkpoint.

        Returns:
            What is to be removed now: that may take long, and nobody has to be kept from writing meanwhile.
        """
        renamed = {path: self._temporary(path.name) for path in self.directory.glob(f"{_REPLACED}*")}
        for path, target in renamed.items():
            os.rename(path, target)
        for path in (self.directory / name for name in _names(self.directory) - self._kept(newest)):
            with _unused(path) as unused:
                if unused:  # else another job loads it now; the next commit removes it
                    renamed[path] = self._temporary(path.name)
                    os.rename(path, renamed[path])
        return list(renamed.values())

    def _upload(self, newest: Path) -> None:
        """Send the newest, and what is kept but was kept from the mirror by a kill or a fault; then the notes."""
        if self.mirror is None:
            return
        for path in (self.directory / name for name in sorted(self._kept(newest), key=step_of)):
            if not self.mirror.holds(path) and (path == newest or _is_whole(path)):
                self.mirror.push(path, self.guard)
        self.mirror.note([path for name in (LATEST, BEST) if (path := self.directory / name).exists()], self.guard)


def name_of(step: int) -> str:
    """Directory name of a step's checkpoint."""
    return f"step-{step:06d}"


def step_of(name: str) -> int:
    """Step of a directory's name; -1 when it is none of a checkpoint."""
    digits = name.removeprefix("step-")
    return int(digits) if digits.isdigit() else -1


@contextlib.contextmanager
def in_use(checkpoint: Path) -> Iterator[None]:
    """While inside, no other job removes this checkpoint."""
    handle = os.open(checkpoint, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def _unused(checkpoint: Path, wait: bool = False) -> Iterator[bool]:
    """Whether nobody is inside `in_use`; nobody enters before this ends."""
    handle = os.open(checkpoint, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(handle)


def _names(directory: Path) -> set[str]:
    return {path.name for path in directory.glob("step-*") if path.is_dir() and step_of(path.name) >= 0}


def _is_whole(checkpoint: Path) -> bool:
    try:
        return bool(read_manifest(checkpoint))
    except ValueError:
        return False


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and "checkpoint" in content else None
