"""The engine's log, followed from outside: whole lines only, events turned into sentences."""

import json
from pathlib import Path


class LogFollower:
    """Reads what was added to a log since the last call."""

    def __init__(self, path: Path, *, last_lines: int | None = None):
        """Args: path: need not exist yet; last_lines: skip what is there but for so many lines, None reads it all."""
        self._path = path
        self._offset = 0
        self._rest = b""
        if last_lines is not None and path.exists():
            lines = path.read_bytes().split(b"\n")
            self._offset = sum(len(line) + 1 for line in lines[:-last_lines - 1])

    def lines(self, *, final: bool = False) -> list[str]:
        """New lines; with `final` also a last one without an end, for a process that died in mid-line."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                added = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(added)
        *whole, self._rest = (self._rest + added).split(b"\n")
        if final and self._rest:
            whole, self._rest = [*whole, self._rest], b""
        return [line.decode(errors="replace") for line in whole]


def readable(line: str) -> str:
    """An event as `name: key value, key value`; any other line as it is."""
    try:
        event = json.loads(line) if line.startswith('{"event"') else None
    except ValueError:
        return line
    if event is None:
        return line
    name = event.pop("event")
    seconds = event.pop("s", None)
    fields = ", ".join(f"{key} {_short(value)}" for key, value in event.items())
    return f"{'' if seconds is None else f'[{seconds:.0f} s] '}{name}{': ' if fields else ''}{fields}"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
