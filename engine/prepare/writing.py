"""What the prepare stage writes: Parquet shards, the quarantine file, the manifest."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from engine import store
from engine.prepare.rendering import Tokens, messages_json
from engine.prompts import SCHEMA
from engine.rows import BadRow, Candidate

ROW_GROUP_ROWS = 1024
# Everything that shapes the bytes is pinned: the same rows give the same file. Nobody queries the files: no statistics.
WRITER_SETTINGS: dict[str, Any] = {
    "version": "2.6", "data_page_version": "1.0", "compression": "zstd", "compression_level": 3,
    "use_dictionary": False, "write_statistics": False, "store_schema": True,
}


class ShardWriter:
    """Writes the rows of one set as `NAME/00000.parquet`, ...; holds one row group in memory."""

    def __init__(self, directory: Path, name: str, rows_per_shard: int):
        """Args: directory: of the output; name: of the set."""
        self._directory, self._name, self._rows_per_shard = directory, name, rows_per_shard
        self._pending: list[dict[str, Any]] = []
        self._writer: pq.ParquetWriter | None = None
        self._shard_rows = 0
        self._files: list[tuple[str, int]] = []
        (directory / name).mkdir()

    def add(self, candidate: Candidate, digest: bytes, tokens: Tokens) -> None:
        """Append one row."""
        self._pending.append({
            "id": digest.hex()[:16], "task": candidate.task, "text": candidate.text, "answer": candidate.answer,
            "messages": messages_json(candidate), "token_ids": tokens.ids, "responses": tokens.responses or None,
            "metadata": json.dumps(candidate.metadata, sort_keys=True, ensure_ascii=False)})
        self._shard_rows += 1
        if self._shard_rows == self._rows_per_shard:
            self._end_shard()
        elif len(self._pending) == ROW_GROUP_ROWS:
            self._end_group()

    def close(self) -> list[dict[str, Any]]:
        """Finish the last shard; the manifest's entry of each file: name, rows, bytes, sha256."""
        if self._shard_rows:
            self._end_shard()
        return [{"name": name, "rows": rows, "bytes": (self._directory / name).stat().st_size,
                 "sha256": store.sha256_file(self._directory / name)} for name, rows in self._files]

    def _end_group(self) -> None:
        if self._writer is None:
            name = f"{self._name}/{len(self._files):05d}.parquet"
            self._writer = pq.ParquetWriter(self._directory / name, SCHEMA, **WRITER_SETTINGS)
            self._files.append((name, 0))
        self._writer.write_table(pa.Table.from_pylist(self._pending, schema=SCHEMA), row_group_size=ROW_GROUP_ROWS)
        self._pending = []

    def _end_shard(self) -> None:
        if self._pending:
            self._end_group()
        assert self._writer
        self._writer.close()
        self._writer = None
        self._files[-1] = (self._files[-1][0], self._shard_rows)
        self._shard_rows = 0


class Quarantine:
    """The file of bad rows: one JSON object a line with set, file, line, kind and reason."""

    FILE = "quarantine.jsonl"

    def __init__(self, path: Path):
        """Args: path: of the file; an earlier attempt's is replaced."""
        self.path = path
        self._file = path.open("w", encoding="utf-8")
        self.first: dict[str, BadRow] = {}
        """The first bad row of each set."""

    def add(self, name: str, bad: BadRow) -> None:
        """Append a bad row of the set `name`."""
        self.first.setdefault(name, bad)
        self._file.write(json.dumps({"set": name, **asdict(bad)}, ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Flush."""
        self._file.close()
