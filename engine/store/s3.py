"""The S3 half of the store, over boto3: retries, multipart transfers with checksums, streams that resume."""

import io
import os
import tempfile
import time
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NoReturn
from urllib.parse import urlsplit

import boto3
from boto3.exceptions import Boto3Error
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

from engine.errors import CorruptError, MissingError, StoreError
from engine.store import progress
from engine.store.hashing import sha256_bytes, sha256_file
from engine.store.multipart import Target

ATTEMPTS = 6
"""Tries of one request; botocore waits longer from one to the next."""
ANSWER_LIMIT_S = 60.0
"""A store that says nothing for so long is asked again."""
PART_BYTES = 16 << 20
BLOCK_BYTES = 1 << 20
TRANSFER = TransferConfig(multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES, max_concurrency=4)
MOST_DELETED = 1000
"""Objects of one request to delete: S3 takes no more."""
HASH_KEY = "sha256"
"""Object metadata with the content's sha256: what was uploaded is what is downloaded, whatever lies between."""
MISSING_CODES = ("NoSuchKey", "NoSuchBucket", "404", "NotFound")
PASSING_CODES = ("SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout")
FIRST_WAIT_S = 0.5
"""Before what was refused with one of these codes is asked for again; each time twice as long."""
FAILURES = (BotoCoreError, ClientError, Boto3Error, HTTPClientError)


def put(uri: str, data: bytes) -> None:
    """Create or replace an object; visible whole or not at all."""
    bucket, key = split(uri)
    try:
        _client().put_object(Bucket=bucket, Key=key, Body=data, Metadata={HASH_KEY: sha256_bytes(data)})
    except FAILURES as error:
        fail("write", uri, error)


def get(uri: str) -> bytes:
    """The content of an object, checked against its checksum and its recorded sha256."""
    bucket, key = split(uri)
    try:
        answer = _client().get_object(Bucket=bucket, Key=key)
    except FAILURES as error:
        fail("read", uri, error)
    with ResumingStream(uri, answer["Body"], answer["ETag"], answer["ContentLength"]) as stream:
        data = stream.readall()
    _check_hash("read", uri, answer["Metadata"], sha256_bytes(data))
    return data


def open_stream(uri: str) -> BinaryIO:
    """A buffered reader over an object."""
    bucket, key = split(uri)
    try:
        answer = _client().get_object(Bucket=bucket, Key=key)
    except FAILURES as error:
        fail("open", uri, error)
    return io.BufferedReader(ResumingStream(uri, answer["Body"], answer["ETag"], answer["ContentLength"]), BLOCK_BYTES)


def exists(uri: str) -> bool:
    """Whether there is an object, or any object under `uri/`."""
    bucket, key = split(uri, need_key=False)
    try:
        if key and _head(bucket, key):
            return True
        prefix = f"{key.rstrip('/')}/" if key else ""
        return _client().list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=1).get("KeyCount", 0) > 0
    except FAILURES as error:
        fail("look for", uri, error)


def etag(uri: str) -> str:
    """The store's own tag of an object's content."""
    bucket, key = split(uri)
    try:
        return _client().head_object(Bucket=bucket, Key=key)["ETag"].strip('"')
    except FAILURES as error:
        fail("look at", uri, error)


def list_keys(uri: str) -> list[str]:
    """Keys under `uri/`, relative to it."""
    return [item["Key"] for item in list_objects(uri)]


def list_objects(uri: str) -> list[dict[str, Any]]:
    """What the store says of every object under `uri/`: `Key` relative to it, `Size`, `LastModified`."""
    bucket, key = split(uri, need_key=False)
    prefix = f"{key.rstrip('/')}/" if key else ""
    try:
        pages = _client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        # Some tools make an empty object for a directory.
        return [item | {"Key": item["Key"].removeprefix(prefix)} for page in pages for item in page.get("Contents", ())
                if not item["Key"].endswith("/")]
    except FAILURES as error:
        fail("list", uri, error)


def list_prefixes(uri: str) -> list[str]:
    """The first parts of the keys under `uri/` that have more than one."""
    bucket, key = split(uri, need_key=False)
    prefix = f"{key.rstrip('/')}/" if key else ""
    try:
        pages = _client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix, Delimiter="/")
        return [item["Prefix"].removeprefix(prefix).rstrip("/") for page in pages
                for item in page.get("CommonPrefixes", ())]
    except FAILURES as error:
        fail("list", uri, error)


def upload(source: Path, uri: str) -> None:
    """Copy a local file to an object, in parallel parts with checksums when it is large.

    Nothing is sent when the object has this content already, so an upload that is tried again only sends the rest.
    """
    bucket, key = split(uri)
    try:
        size, metadata = source.stat().st_size, {HASH_KEY: sha256_file(source)}
        if _holds(bucket, key, size, metadata):
            return
        if size <= PART_BYTES:
            _client().put_object(Bucket=bucket, Key=key, Body=source.read_bytes(), Metadata=metadata,
                                 ChecksumAlgorithm="CRC32")
            progress.moved()
            return
        target = Target(_client(), bucket, key, metadata, PART_BYTES)
        target.upload(source)
        if not _holds(bucket, key, size, metadata):
            # It went on with an upload that was begun for another content, whose metadata it keeps.
            target.upload(source, resume=False)
    except OSError as error:
        raise StoreError(f"upload {source} to {uri}: {error.strerror or error}") from None
    except FAILURES as error:
        fail("upload", uri, error)


def download(uri: str, target: Path) -> None:
    """Copy an object to a local file that appears whole, checked against its recorded sha256."""
    bucket, key = split(uri)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    os.close(handle)
    try:
        head = _client().head_object(Bucket=bucket, Key=key)
        _client().download_file(bucket, key, temporary, Config=TRANSFER, Callback=progress.moved)
        _check_hash("download", uri, head["Metadata"], sha256_file(temporary))
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except OSError as error:
        raise StoreError(f"download {uri} to {target}: {error.strerror or error}") from None
    except FAILURES as error:
        fail("download", uri, error)
    finally:
        Path(temporary).unlink(missing_ok=True)


def delete(uri: str, last: str) -> None:
    """Remove an object, and all under `uri/`: every object named `last` before the others."""
    bucket, key = split(uri)
    root = key.rstrip("/")
    names = list_keys(uri)
    marks = [f"{root}/{name}" for name in names if name.rsplit("/", 1)[-1] == last]
    others = [root, *(f"{root}/{name}" for name in names if name.rsplit("/", 1)[-1] != last)]
    try:
        for name in marks:
            _client().delete_object(Bucket=bucket, Key=name)
        for start in range(0, len(others), MOST_DELETED):
            _delete_together(bucket, others[start : start + MOST_DELETED], uri)
    except FAILURES as error:
        fail("delete", uri, error)


def _delete_together(bucket: str, keys: list[str], uri: str) -> None:
    for attempt in range(ATTEMPTS):
        objects: list[Any] = [{"Key": key} for key in keys]
        answer = _client().delete_objects(Bucket=bucket, Delete={"Objects": objects, "Quiet": True})
        refused = answer.get("Errors", ())
        if not refused:
            return
        # The answer as a whole is well: botocore does not look for what was refused in it.
        if attempt + 1 == ATTEMPTS or any(item.get("Code") not in PASSING_CODES for item in refused):
            break
        keys = [item["Key"] for item in refused]
        time.sleep(FIRST_WAIT_S * 2**attempt)
    raise StoreError(f"delete {uri}: the store answers {refused[0].get('Code', 'unknown')} for "
                     f"s3://{bucket}/{refused[0].get('Key', '')}")


class ResumingStream(io.RawIOBase):
    """An object's content; a dropped connection is opened again at the byte where it broke, of the same object only."""

    def __init__(self, uri: str, body: Any, tag: str, size: int):
        """Args: body: botocore's, from byte 0; tag: the object's ETag; size: in bytes."""
        super().__init__()
        self._uri, self._body, self._tag, self._size = uri, body, tag, size
        self._position = 0

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` with the next bytes; 0 at the end.

        Raises:
            StoreError: the connection breaks again and again, or the object has been replaced.
        """
        attempt = 0
        while self._position < self._size:
            try:
                # Not urllib3's errors by name: botocore lets several kinds of them through while it reads a body.
                data = self._body.read(min(len(buffer), self._size - self._position))
                if data:
                    buffer[: len(data)] = data
                    self._position += len(data)
                    progress.moved()
                    return len(data)
                error: Exception = StoreError(f"read {self._uri}: ended at byte {self._position} of {self._size}")
            except Exception as broken:  # noqa: BLE001
                error = broken
            attempt += 1
            if attempt == ATTEMPTS:
                fail("read", self._uri, error)
            self._reopen()
        return 0

    def _reopen(self) -> None:
        bucket, key = split(self._uri)
        try:
            self._body = _client().get_object(
                Bucket=bucket, Key=key, Range=f"bytes={self._position}-", IfMatch=self._tag)["Body"]
        except FAILURES as error:
            fail("continue to read", self._uri, error)

    def close(self) -> None:
        """Drop the connection."""
        if not self.closed:
            self._body.close()
        super().close()


def split(uri: str, need_key: bool = True) -> tuple[str, str]:
    """Bucket and key of `s3://bucket/key`.

    Raises:
        StoreError: no bucket, or no key where one is needed.
    """
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    if not bucket or (need_key and not key):
        raise MissingError(f"{uri}: not of the form s3://bucket/key")
    return bucket, key


def fail(operation: str, uri: str, error: Exception) -> NoReturn:
    """Raise the store's error for one of boto3's: one line, no credentials."""
    if isinstance(error, StoreError):
        raise error
    if isinstance(error, ClientError):
        code = str(error.response.get("Error", {}).get("Code", "unknown"))
        kind = MissingError if code in MISSING_CODES else StoreError
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", "no")
        raise kind(f"{operation} {uri}: the store answers {code} (HTTP {status})") from None
    # Their texts may quote whole addresses and headers: the class says enough.
    where = f" at {_endpoint()}" if os.environ.get("AWS_ENDPOINT_URL") else ""
    cause = error.__cause__ or error.__context__ or error
    names = type(error).__name__ if cause is error else f"{type(error).__name__}, {type(cause).__name__}"
    raise StoreError(f"{operation} {uri}: {names}{where}") from None


def _head(bucket: str, key: str) -> dict | None:
    try:
        return _client().head_object(Bucket=bucket, Key=key)
    except ClientError as error:
        if error.response["Error"]["Code"] in MISSING_CODES:
            return None
        raise


def _holds(bucket: str, key: str, size: int, metadata: dict[str, str]) -> bool:
    try:
        head = _head(bucket, key)
    except ClientError as error:
        if error.response["Error"]["Code"] == "403":
            return False  # the right to read is another one than the right to write
        raise
    return head is not None and head["ContentLength"] == size and head["Metadata"] == metadata


def _check_hash(operation: str, uri: str, metadata: dict[str, str], sha256: str) -> None:
    expected = metadata.get(HASH_KEY, sha256)
    if sha256 != expected:
        raise CorruptError(f"{operation} {uri}: sha256 {sha256[:12]} is not the {expected[:12]} it was written with")


def _client() -> Any:
    return _client_at(os.environ.get("AWS_ENDPOINT_URL"), os.getpid())


@lru_cache(maxsize=4)
def _client_at(endpoint: str | None, pid: int) -> Any:
    # One client a process and endpoint: they are thread-safe, but not across a fork.
    return boto3.client("s3", endpoint_url=endpoint, config=Config(
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS}, connect_timeout=10, read_timeout=ANSWER_LIMIT_S,
        max_pool_connections=64))


def _endpoint() -> str:
    parts = urlsplit(os.environ["AWS_ENDPOINT_URL"])
    return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")
