"""Files at local paths and `s3://` URIs behind one small interface. Torch-free; boto3 loads when S3 is first used.

Everything written becomes visible whole or not at all: locally by a synced temporary file and a rename, on S3 because a
put is atomic; a directory by its manifest, which is copied last.

Credentials come from the usual AWS chain only, the endpoint of an S3-compatible store from `AWS_ENDPOINT_URL`.
Errors are one line, `StoreError: OPERATION URI: reason`, without credentials; `MissingError` when nothing is there.
"""

import contextlib
import hashlib
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from engine.errors import MissingError, RefusedError, StoreError
from engine.store.hashing import hash_dir, hash_model_dir, sha256_bytes, sha256_file
from engine.store.progress import watch_transfers

__all__ = [
    "MANIFEST", "StoredFile", "delete", "download_dir", "download_file", "exists", "fingerprint", "hash_dir",
    "hash_model_dir", "is_s3", "join", "list_dirs", "list_files", "open_read", "read_bytes", "read_text", "sha256",
    "sha256_bytes", "sha256_file", "stat_files", "sync_directory", "upload_dir", "upload_file", "upload_files",
    "watch_transfers", "write_atomic", "write_bytes",
]

MANIFEST = "manifest.json"
"""A directory with a file of this name is whole: it is written last and read first."""
PARALLEL_FILES = 8


@dataclass(frozen=True)
class StoredFile:
    """One file of a directory, without its content."""

    name: str
    """Relative to the directory, `/` between parts."""
    bytes: int
    modified: float
    """Seconds since the epoch."""


def is_s3(uri: str | Path) -> bool:
    """Whether `uri` names an object store and not a local path."""
    return str(uri).startswith("s3://")


def join(uri: str | Path, *parts: str) -> str:
    """`uri` extended by path parts: `join("s3://b/run", "train", "x.parquet")`."""
    if not is_s3(uri):
        return str(Path(uri, *parts))
    return "/".join([str(uri).rstrip("/"), *(part.strip("/") for part in parts)])


def write_atomic(path: str | Path, content: str | bytes) -> None:
    """Replace the local file `path` so that a reader, or a crash at any moment, sees the old or the new whole file."""
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    temporary = _temporary_beside(path)
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make renames inside `directory` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(uri: str | Path, content: str | bytes) -> None:
    """Create or replace one file, atomically; parent directories are made."""
    data = content.encode() if isinstance(content, str) else content
    if is_s3(uri):
        return _s3().put(str(uri), data)
    try:
        Path(uri).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(uri, data)
    except OSError as error:
        raise _local_error("write", uri, error) from None
    return None


def read_bytes(uri: str | Path) -> bytes:
    """The whole content of one file.

    Raises:
        MissingError: nothing there. StoreError: it cannot be read.
    """
    if is_s3(uri):
        return _s3().get(str(uri))
    try:
        return Path(uri).read_bytes()
    except OSError as error:
        raise _local_error("read", uri, error) from None


def read_text(uri: str | Path) -> str:
    """The whole content of one UTF-8 file."""
    return read_bytes(uri).decode()


def open_read(uri: str | Path) -> BinaryIO:
    """Open one file for streaming; on S3 a dropped connection continues where it broke. Close it after use."""
    if is_s3(uri):
        return _s3().open_stream(str(uri))
    try:
        return open(uri, "rb")
    except OSError as error:
        raise _local_error("open", uri, error) from None


def exists(uri: str | Path) -> bool:
    """Whether a file, or a directory with a file anywhere in it, is there."""
    if is_s3(uri):
        return _s3().exists(str(uri))
    path = Path(uri)
    return path.is_file() or any(item.is_file() for item in path.rglob("*"))


def fingerprint(uri: str | Path) -> str:
    """A short text that changes with a file's content: its sha256, or on S3 the store's own tag."""
    return f"etag:{_s3().etag(str(uri))}" if is_s3(uri) else f"sha256:{sha256_file(uri)}"


def list_files(uri: str | Path) -> list[str]:
    """Names of all files under a directory, relative to it, sorted, `/` between parts; empty when nothing is there."""
    if is_s3(uri):
        return sorted(_s3().list_keys(str(uri)))
    root = Path(uri)
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def sha256(uri: str | Path) -> str:
    """sha256 of one file's content, hexadecimal; on S3 it is streamed."""
    if not is_s3(uri):
        try:
            return sha256_file(uri)
        except OSError as error:
            raise _local_error("read", uri, error) from None
    with open_read(uri) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]


def list_dirs(uri: str | Path) -> list[str]:
    """Names of the directories right under a directory, sorted; nothing below them is looked at."""
    if is_s3(uri):
        return sorted(_s3().list_prefixes(str(uri)))
    try:
        with os.scandir(uri) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _local_error("list", uri, error) from None


def stat_files(uri: str | Path) -> list[StoredFile]:
    """Size and time of every file under a directory, by name; a file that goes meanwhile is left out."""
    if is_s3(uri):
        found = [StoredFile(item["Key"], item["Size"], item["LastModified"].timestamp())
                 for item in _s3().list_objects(str(uri))]
    else:
        found = list(_stat_local(Path(uri)))
    return sorted(found, key=lambda file: file.name)


def upload_file(source: str | Path, uri: str | Path) -> None:
    """Copy a local file to `uri`; on S3 in parallel parts with checksums."""
    if is_s3(uri):
        return _s3().upload(Path(source), str(uri))
    return _copy(Path(source), Path(uri))


def download_file(uri: str | Path, target: str | Path) -> None:
    """Copy one file to a local path; it appears there whole and, from S3, with the sha256 it was uploaded with."""
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    if is_s3(uri):
        return _s3().download(str(uri), target)
    return _copy(Path(uri), target)


def upload_dir(source: str | Path, uri: str | Path, last: str = MANIFEST) -> None:
    """Copy a local directory to `uri`, files in parallel, the file `last` after all others (if there is one)."""
    names = list_files(source)
    upload_files(source, uri, [name for name in names if name != last])
    if last in names:
        upload_file(Path(source, last), join(uri, last))


def upload_files(source: str | Path, uri: str | Path, names: Iterable[str]) -> None:
    """Copy some files of a local directory, named relative to it, to the same names under `uri`, in parallel."""
    with ThreadPoolExecutor(PARALLEL_FILES) as pool:
        list(pool.map(lambda name: upload_file(Path(source, name), join(uri, name)), names))


def download_dir(uri: str | Path, target: str | Path) -> None:
    """Copy a directory to a local path that does not exist yet; it appears there whole.

    Raises:
        MissingError: nothing under `uri`.
        RefusedError: a name would lead out of `target`.
    """
    target = Path(target)
    names = list_files(uri)
    if not names:
        raise MissingError(f"download {uri}: no files there")
    for name in names:
        # Keys of an object store are any text; "b//etc/x" is the name "/etc/x" under "b".
        if name.startswith("/") or ".." in name.split("/"):
            raise RefusedError(f"download {uri}: the name {name!r} leads out of {target}; remove that object")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as temporary:
        staged = Path(temporary, "whole")
        with ThreadPoolExecutor(PARALLEL_FILES) as pool:
            list(pool.map(lambda name: download_file(join(uri, name), staged / name), names))
        os.replace(staged, target)
    sync_directory(target.parent)


def delete(uri: str | Path, last: str = MANIFEST) -> None:
    """Remove a file, or a directory with all in it: its manifests first, so that half of it never looks whole.

    Args: last: name of the files that are written last, and so removed first, at any depth.
    """
    if is_s3(uri):
        return _s3().delete(str(uri), last)
    path = Path(uri)
    try:
        if path.is_dir():
            for mark in list(path.rglob(last)):
                mark.unlink(missing_ok=True)
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise _local_error("delete", uri, error) from None
    return None


def _stat_local(root: Path) -> Iterator[StoredFile]:
    for path in root.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                yield StoredFile(path.relative_to(root).as_posix(), status.st_size, status.st_mtime)


def _copy(source: Path, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = _temporary_beside(target)
        try:
            shutil.copyfile(source, temporary)
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
        sync_directory(target.parent)
    except OSError as error:
        raise _local_error("copy", f"{source} to {target}", error) from None


def _temporary_beside(path: Path) -> Path:
    # Not mkstemp: its files are 0600 whatever the umask says.
    return path.parent / f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"


def _local_error(operation: str, uri: str | Path, error: OSError) -> StoreError:
    kind = MissingError if isinstance(error, FileNotFoundError) else StoreError
    return kind(f"{operation} {uri}: {error.strerror or error}")


def _s3():
    from engine.store import s3

    return s3
