"""Where an iteration's time and memory go: seconds and peak bytes of each phase."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

PHASES = ("transition", "generate", "score", "logprobs", "values", "update")
"""An iteration's phases; what is in none of them is overhead."""
_CLEAR_REFS = Path("/proc/self/clear_refs")


class PhaseClock:
    """Adds up seconds and keeps the highest memory of each phase between two calls of `take`."""

    def __init__(self, on_enter: Callable[[str], None] | None = None):
        """Args: on_enter: told the name of each phase as it begins."""
        self._on_enter = on_enter
        self._seconds: dict[str, float] = defaultdict(float)
        self.peak_bytes: dict[str, int] = defaultdict(int)
        """Peak memory by phase since the start: of the device on GPU, of the process on CPU."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Account what happens inside to `name`; phases do not nest."""
        if self._on_enter:
            self._on_enter(name)
        _reset_peak()
        started = time.monotonic()
        try:
            yield
        finally:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._seconds[name] += time.monotonic() - started
            self.peak_bytes[name] = max(self.peak_bytes[name], _peak())

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call, and start anew."""
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds


class Timed:
    """A role whose methods are phases."""

    def __init__(self, role: Any, clock: PhaseClock, **phases: str):
        """Args: phases: method name to phase name."""
        self._role, self._clock, self._phases = role, clock, phases

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._role, name)
        phase = self._phases.get(name)
        if phase is None:
            return attribute

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self._clock.phase(phase):
                return attribute(*args, **kwargs)

        return timed


def _reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return
    try:
        _CLEAR_REFS.write_text("5")  # resets VmHWM, proc(5)
    except OSError:
        return  # not Linux, or not allowed: peaks are then those since the start


def _peak() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
