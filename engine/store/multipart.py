"""Uploads of large files to S3 in parallel parts; one that was interrupted goes on with the parts that are missing."""

import base64
import hashlib
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError

from engine.store import progress

PARALLEL_PARTS = 4
MOST_PARTS = 10_000
"""S3 takes no more."""


@dataclass(frozen=True)
class Target:
    """Where a file goes."""

    client: Any
    bucket: str
    key: str
    metadata: dict[str, str]
    part_bytes: int

    def upload(self, source: Path, resume: bool = True) -> None:
        """Copy `source`; parts that an earlier, interrupted upload of the same content left are not sent again.

        Args: resume: False to begin anew whatever there is.
        Raises:
            botocore's errors: the next call goes on from here.
        """
        size = source.stat().st_size
        length = max(self.part_bytes, -(-size // MOST_PARTS))
        numbers = range(1, -(-size // length) + 1)
        upload_id, there = self._unfinished() if resume else (None, {})
        if upload_id is None:
            created = self._call("create_multipart_upload", Metadata=self.metadata, ChecksumAlgorithm="CRC32")
            upload_id = created["UploadId"]
        with open(source, "rb") as file, ThreadPoolExecutor(PARALLEL_PARTS) as pool:
            waiting: list[Any] = []
            parts = []
            for number in numbers:
                # Only so many parts in memory as are on their way.
                if len(waiting) == PARALLEL_PARTS:
                    parts.append(waiting.pop(0).result())
                waiting.append(pool.submit(self._send, upload_id, number, file.read(length), there.get(number)))
            parts += [part.result() for part in waiting]
        self._call("complete_multipart_upload", UploadId=upload_id, MultipartUpload={"Parts": parts})

    def _send(self, upload_id: str, number: int, data: bytes, there: str | None) -> dict[str, Any]:
        """One part, unless the one that is there has the same MD5 (an encrypting store tags otherwise: sent again)."""
        checksum = base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
        etag = f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
        if there != etag:
            etag = self._call(
                "upload_part", UploadId=upload_id, PartNumber=number, Body=data, ChecksumCRC32=checksum)["ETag"]
            progress.moved()
        return {"PartNumber": number, "ETag": etag, "ChecksumCRC32": checksum}

    def _unfinished(self) -> tuple[str | None, dict[int, str]]:
        """The last interrupted upload to this key and the ETags of its parts, by number."""
        try:
            pages = self.client.get_paginator("list_multipart_uploads").paginate(Bucket=self.bucket, Prefix=self.key)
            uploads = [item for page in pages for item in page.get("Uploads", ()) if item["Key"] == self.key]
            if not uploads:
                return None, {}
            upload_id = max(uploads, key=lambda item: item["Initiated"])["UploadId"]
            pages = self.client.get_paginator("list_parts").paginate(
                Bucket=self.bucket, Key=self.key, UploadId=upload_id)
            return upload_id, {item["PartNumber"]: item["ETag"] for page in pages for item in page.get("Parts", ())}
        except ClientError as error:
            if error.response["Error"]["Code"] in ("AccessDenied", "NoSuchUpload", "NotImplemented"):
                return None, {}  # the right to list is another one than the right to write
            raise

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        return getattr(self.client, method)(Bucket=self.bucket, Key=self.key, **arguments)
