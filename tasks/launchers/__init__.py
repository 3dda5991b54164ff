"""Where engine jobs run. A launcher is a module with `start`, `alive` and `kill`; RATCHET_LAUNCHER names it."""

import importlib
from pathlib import Path
from typing import Any, Protocol

from engine.errors import SpecError
from tasks import deployment

LAUNCHERS = ("local",)


class Launcher(Protocol):
    """What every launcher offers. `record` is the content of job.json."""

    def start(self, directory: Path, stage: str, *, attempt: int, ranks: int, stall_limit_s: int) -> None:
        """Start `python -m engine STAGE DIRECTORY` and return when job.json says so.

        Args: attempt: given to the engine as RATCHET_ATTEMPT; stall_limit_s: without progress for so long it is ended.
        Raises:
            SpecError: the job needs more than this place has.
            FaultError: it did not start.
        """

    def alive(self, directory: Path, record: dict[str, Any]) -> bool:
        """Whether the job of this record still runs."""

    def kill(self, directory: Path) -> None:
        """End every process of the job; returns when none is left, within 5 s."""


def configured() -> Launcher:
    """The launcher that RATCHET_LAUNCHER names, `local` by default.

    Raises:
        SpecError: no launcher of that name.
    """
    name = deployment.launcher()
    if name not in LAUNCHERS:
        raise SpecError(f"RATCHET_LAUNCHER={name!r} is not a launcher; known: {', '.join(LAUNCHERS)}")
    return importlib.import_module(f"tasks.launchers.{name}")
