"""Who wants to know that a transfer to or from S3 goes on: one may take longer than a job may stand still."""

from collections.abc import Callable

_watchers: list[Callable[[], object]] = []


def watch_transfers(moved: Callable[[], object]) -> None:
    """Have `moved` called, in any thread, whenever another part of a transfer is through."""
    _watchers.append(moved)


def moved(*_: object) -> None:
    """A part is through."""
    for watcher in _watchers:
        watcher()
