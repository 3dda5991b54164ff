"""Whether an engine still works, judged by what it writes about itself. Standard library only (the wrapper uses it).

The engine's heartbeat comes from a thread of its own: it stops when the process is dead, stopped, or holds Python's
lock for ever. It also counts the moves of the main thread (phases, iterations): they stop when that waits for something
that never comes. A long compilation beats, and is allowed as long as a phase may be.
"""

import contextlib
import json
from pathlib import Path

TICK_S = 1.0
"""Seconds between two looks."""
FIRST_BEAT_LIMIT_S = 600.0
"""To the first heartbeat: starting Python and the ranks."""
HEARTBEAT_LIMIT_S = 300.0
FOLLOWED_LIMIT_S = 1800.0
"""To the next task that follows the job; longer than Airflow waits between two tries."""


class DeadMan:
    """Looks at one heartbeat file, every `tick_s`.

    Time is counted in looks and not by a clock: when the machine stood still, or its clock jumped, nobody is late.
    """

    def __init__(self, path: Path, *, heartbeat_limit_s: float, first_limit_s: float, stall_limit_s: float,
                 tick_s: float = TICK_S):
        """Args: path: need not exist yet; stall_limit_s: longest time between two moves."""
        self._path, self._tick_s = path, tick_s
        self._limit_s, self._first_limit_s, self._stall_limit_s = heartbeat_limit_s, first_limit_s, stall_limit_s
        self._last: dict[str, int] = {}
        self._silent_s = self._still_s = 0.0
        self.pid: int | None = None
        """Of the process that beats."""

    def look(self) -> str | None:
        """One sentence that says why the engine counts as hung; None while it does not."""
        beat = self._last
        with contextlib.suppress(OSError, ValueError):
            beat = json.loads(self._path.read_text())
        self.pid = beat.get("pid")
        self._silent_s = 0.0 if beat.get("step") != self._last.get("step") else self._silent_s + self._tick_s
        self._still_s = 0.0 if beat.get("moves") != self._last.get("moves") else self._still_s + self._tick_s
        self._last = beat
        limit_s = self._limit_s if beat else self._first_limit_s
        if self._silent_s > limit_s:
            return f"no heartbeat for {self._silent_s:.0f} s (limit {limit_s:.0f} s)"
        if beat and self._still_s > self._stall_limit_s:
            return (f"no progress for {self._still_s:.0f} s although the process lives (limit "
                    f"{self._stall_limit_s:.0f} s; a training's is stall_limit_s of its spec: raise it if a phase may "
                    "take longer)")
        return None


class Following:
    """Looks whether a task still follows a job, every `tick_s`, by the file that the task touches meanwhile.

    A person may end a run between two tries of a task: then nobody comes for the job any more, and nobody ends it.
    """

    def __init__(self, path: Path, *, limit_s: float, tick_s: float = TICK_S):
        """Args: path: need not exist yet."""
        self._path, self._limit_s, self._tick_s = path, limit_s, tick_s
        self._seen: int | None = None
        self._alone_s = 0.0

    def look(self) -> str | None:
        """One sentence that says that the job has been left; None while it has not."""
        seen = self._path.stat().st_mtime_ns if self._path.exists() else None
        self._alone_s = 0.0 if seen != self._seen else self._alone_s + self._tick_s
        self._seen = seen
        return f"no task has followed it for {self._alone_s:.0f} s" if self._alone_s > self._limit_s else None
