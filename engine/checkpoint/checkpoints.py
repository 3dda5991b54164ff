"""The checkpoints of a run in one directory.

    step-000120/          exists only whole: written as .saving-step-000120, sealed by manifest.json, synced, renamed
      actor/ critic/      Megatron distributed checkpoints
      rng/rank-00000.pt   random states of every rank
      state.json          data cursor, algorithm state, policy version, ... of the caller
      manifest.json       size and sha256 of every other file
    latest.json           names the newest; moves after the rename

A directory without a valid manifest does not exist: loading falls back to the newest that has one.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from engine.backends.megatron.parallel import World
from engine.checkpoint.manifest import read_manifest, write_manifest
from engine.checkpoint.rng import rng_state, set_rng_state
from engine.errors import MissingError, StoreError
from engine.store import sync_directory, write_atomic

LATEST = "latest.json"
STATE = "state.json"
_SAVING = ".saving-"
_REPLACED = ".replaced-"

log = logging.getLogger(__name__)


class Saveable(Protocol):
    """A role's model. Every rank calls both methods."""

    def save(self, directory: Path) -> None:
        """Write into an empty directory that all ranks share."""

    def load(self, directory: Path) -> None:
        """Read what `save` wrote."""


class Checkpoints:
    """Saves and loads; every rank calls every method, and either all ranks raise or none."""

    def __init__(self, directory: str | Path, world: World, keep_last: int = 2,
                 warn: Callable[[str], None] = log.warning):
        """Prepare.

        Args:
            directory: a local path that all ranks share; it is made when something is saved.
            world: the rank's place.
            keep_last: newest checkpoints to keep; older ones go after a commit.
            warn: called on the first rank with one line when a checkpoint could not be used.
        """
        self.directory, self.world, self.keep_last = Path(directory), world, keep_last
        self._warn = warn

    def save(self, step: int, roles: Mapping[str, Saveable], state: dict[str, Any]) -> Path:
        """Write and commit `step-000120/`, move latest.json, remove what is too old.

        Args:
            step: policy version; a checkpoint of the same step is replaced.
            roles: what to save, by directory name.
            state: plain JSON, given back by `load`.
        Returns:
            The checkpoint's path.
        Raises:
            StoreError: something could not be written; earlier checkpoints are as before.
        """
        final = self.directory / f"step-{step:06d}"
        saving = self.directory / (_SAVING + final.name)
        self._on_first_rank(lambda: self._prepare(saving, roles))
        for name, role in roles.items():
            role.save(saving / name)
        self._on_every_rank(lambda: _save_tensors(rng_state(), saving / "rng" / f"rank-{self.world.rank:05d}.pt"))
        self._on_first_rank(lambda: self._commit(saving, final, step, state))
        return final

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
            StoreError: the checkpoint does not hold a role.
        """
        source = self.directory if directory is None else Path(directory)
        found = self._on_first_rank(lambda: self._find(source))
        if found is None:
            if directory is not None:
                raise MissingError(f"checkpoint {directory}: no whole checkpoint there")
            return None
        checkpoint, manifest = Path(found[0]), found[1]
        for name, role in roles.items():
            if name not in manifest["roles"]:
                raise StoreError(f"checkpoint {checkpoint}: holds {manifest['roles']}, not {name!r}")
            role.load(checkpoint / name)
        if manifest["layout"] == str(self.world.layout):
            path = checkpoint / "rng" / f"rank-{self.world.rank:05d}.pt"
            set_rng_state(torch.load(path, weights_only=True))
        return json.loads((checkpoint / STATE).read_text())

    def _prepare(self, saving: Path, roles: Mapping[str, Saveable]) -> None:
        for leftover in self.directory.glob(f"{_SAVING}*"):
            shutil.rmtree(leftover)
        for name in (*roles, "rng"):
            (saving / name).mkdir(parents=True)

    def _commit(self, saving: Path, final: Path, step: int, state: dict[str, Any]) -> None:
        write_atomic(saving / STATE, json.dumps(state, indent=1))
        roles = sorted(path.name for path in saving.iterdir() if path.is_dir() and path.name != "rng")
        write_manifest(saving, {"step": step, "layout": str(self.world.layout), "roles": roles})
        replaced = self.directory / (_REPLACED + final.name)
        if final.exists():
            os.rename(final, replaced)
        os.rename(saving, final)
        sync_directory(self.directory)
        write_atomic(self.directory / LATEST, json.dumps({"checkpoint": final.name, "step": step}))
        shutil.rmtree(replaced, ignore_errors=True)
        for old in _by_age(self.directory)[self.keep_last:]:
            # Under its temporary name first: a removal that is interrupted leaves no half a checkpoint.
            doomed = self.directory / (_SAVING + old.name)
            os.rename(old, doomed)
            shutil.rmtree(doomed)

    def _find(self, source: Path) -> tuple[str, dict[str, Any]] | None:
        """The newest whole checkpoint and its manifest; warns about each that is not."""
        if source.name.startswith("step-"):
            candidates = [source]
        else:
            candidates = _by_age(source)
            try:
                named = source / json.loads((source / LATEST).read_text())["checkpoint"]
            except FileNotFoundError:
                named = None
            except (OSError, ValueError, KeyError) as error:
                self._warn(f"checkpoint {source / LATEST} cannot be read ({error}); taking the newest whole one")
                named = None
            if named is not None and named not in candidates:
                self._warn(f"checkpoint {named}: {LATEST} names it but it is not there; taking the newest whole one")
        for candidate in candidates:
            try:
                return str(candidate), read_manifest(candidate)
            except ValueError as error:
                self._warn(f"checkpoint {candidate} is not whole: {error}; taking the one before")
        return None

    def _on_first_rank(self, action: Callable[[], Any]) -> Any:
        """Run `action` on rank 0; its result, or its failure, reaches all ranks."""
        outcome: list[Any] = [None, None]
        if self.world.rank == 0:
            outcome = _attempt(action)
        dist.broadcast_object_list(outcome, src=0)
        if outcome[1]:
            raise StoreError(outcome[1])
        return outcome[0]

    def _on_every_rank(self, action: Callable[[], Any]) -> None:
        """Run `action` on all ranks and wait for all; a failure of one reaches all."""
        outcomes: list[Any] = [None] * self.world.size
        dist.all_gather_object(outcomes, _attempt(action)[1])
        failures = [failure for failure in outcomes if failure]
        if failures:
            raise StoreError(failures[0])


def _attempt(action: Callable[[], Any]) -> list[Any]:
    """[result, None] or [None, one line that says what failed]."""
    try:
        return [action(), None]
    except OSError as error:
        return [None, f"checkpoint {error.filename or ''}: {error.strerror or error}"]


def _save_tensors(state: dict[str, Any], path: Path) -> None:
    torch.save(state, path)


def _by_age(directory: Path) -> list[Path]:
    """Checkpoints by step, newest first."""
    return sorted((path for path in directory.glob("step-*") if path.is_dir()), key=_step_of, reverse=True)


def _step_of(path: Path) -> int:
    digits = path.name.removeprefix("step-")
    return int(digits) if digits.isdigit() else -1
