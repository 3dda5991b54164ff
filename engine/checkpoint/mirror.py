"""A directory of checkpoints in an object store: what survives the machine, and what other jobs resume from."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from engine import store

Guard = Callable[[], AbstractContextManager[None]]


class Mirror:
    """Checkpoints under one `s3://` prefix; one exists when its manifest does."""

    def __init__(self, uri: str):
        """Args: uri: the prefix."""
        self.uri = uri

    def holds(self, checkpoint: Path) -> bool:
        """Whether a local checkpoint is here, and not another one of the same step."""
        if checkpoint.name not in self.names():
            return False
        manifest = checkpoint / store.MANIFEST
        here = store.join(self.uri, checkpoint.name, store.MANIFEST)
        return not manifest.exists() or store.read_bytes(here) == manifest.read_bytes()

    def push(self, checkpoint: Path, guard: Guard) -> None:
        """Upload a checkpoint, its manifest last. What an upload before left there is not sent again.

        Args:
            checkpoint: a whole one, `.../step-000120`.
            guard: entered before the upload and while it becomes visible; raises when this process may not write.
        Raises:
            StoreError: the store refused.
        """
        with guard():
            pass  # An upload may take long: nobody waits for it, and it makes nothing visible.
        target = store.join(self.uri, checkpoint.name)
        names = [name for name in store.list_files(checkpoint) if name != store.MANIFEST]
        store.upload_files(checkpoint, target, names)
        with guard():
            store.upload_file(checkpoint / store.MANIFEST, store.join(target, store.MANIFEST))

    def note(self, notes: Iterable[Path], guard: Guard) -> None:
        """Upload small files that name checkpoints."""
        with guard():
            for note in notes:
                store.upload_file(note, store.join(self.uri, note.name))

    def retain(self, names: set[str], guard: Guard) -> None:
        """Remove all checkpoints but those of these names."""
        for name in set(self.names()) - names:
            with guard():
                store.delete(store.join(self.uri, name))

    def names(self) -> list[str]:
        """Names of the whole checkpoints."""
        files = [name.split("/") for name in store.list_files(self.uri)]
        return sorted(parts[0] for parts in files
                      if len(parts) == 2 and parts[0].startswith("step-") and parts[1] == store.MANIFEST)

    def fetch(self, name: str, target: Path) -> None:
        """Copy a checkpoint to a local path that does not exist yet."""
        store.download_dir(store.join(self.uri, name), target)

    def fetch_note(self, note: Path) -> None:
        """Copy a small file that is not there locally, if it is here."""
        uri = store.join(self.uri, note.name)
        if not note.exists() and store.exists(uri):
            store.download_file(uri, note)
