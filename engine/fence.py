"""Only the newest attempt of a job may write: one that comes back finds its number gone. Torch-free."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from engine.errors import FaultError
from engine.spec.job import ATTEMPT_FILE, ATTEMPT_VARIABLE


class FencedError(FaultError):
    """Another attempt has taken over."""


class Fence:
    """This process's right to commit results of one job."""

    def __init__(self, job_dir: Path, attempt: int | None = None):
        """Args: attempt: of this process; None: the one the environment names, and without it nothing is fenced."""
        named = os.environ.get(ATTEMPT_VARIABLE)
        self.attempt = attempt if attempt is not None else (int(named) if named else None)
        self._path = job_dir / ATTEMPT_FILE

    @contextlib.contextmanager
    def commit(self) -> Iterator[None]:
        """While inside, no other attempt begins.

        Raises:
            FencedError: another attempt has begun.
        """
        if self.attempt is None:
            yield
            return
        with open(self._path, "a+") as file:
            # Shared: a metric does not wait until a slow store has taken a manifest; the next attempt waits for both.
            fcntl.flock(file, fcntl.LOCK_SH)
            self.check()
            yield

    def check(self) -> None:
        """Look without waiting for anybody; another attempt may begin right after.

        Raises:
            FencedError: another attempt has begun.
        """
        if self.attempt is None:
            return
        current = self._path.read_text().strip() if self._path.exists() else ""
        if current != str(self.attempt):
            raise FencedError(f"{self._path.parent}: attempt {self.attempt} may not write any more, "
                              f"attempt {current or 'unknown'} has taken over; this process ends")
