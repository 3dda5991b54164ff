"""Rows of a source, one after the other: each with where it came from, or the reason why it cannot be read."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from engine import store
from engine.errors import DataError
from engine.rows import SUFFIXES, BadRow, Row, read_lines
from engine.spec.prepare import FileSource

ROWS_PER_BATCH = 256


def source_files(source: FileSource) -> list[str]:
    """URIs of the files of a source, in the order they are read.

    Raises:
        DataError: nothing there, or nothing of a known format.
    """
    uri = source.uri
    if uri.endswith(SUFFIXES) and store.exists(uri):
        return [uri]
    names = store.list_files(uri)
    if not names:
        raise DataError(f"source {uri}: nothing there, or not one of {', '.join(SUFFIXES)}")
    if "dataset_dict.json" in names:
        splits = sorted({name.split("/")[0] for name in names if "/" in name})
        raise DataError(f"source {uri}: a dictionary of datasets; give the path of one of its splits {splits}")
    if "state.json" in names:
        state = json.loads(store.read_text(store.join(uri, "state.json")))
        return [store.join(uri, part["filename"]) for part in state["_data_files"]]
    found = [store.join(uri, name) for name in names if name.endswith(SUFFIXES)]
    if not found:
        raise DataError(f"source {uri}: no file ends in one of {', '.join(SUFFIXES)}")
    return found


def read_file(uri: str) -> Iterator[Row | BadRow]:
    """The rows of one file. JSON lines are streamed; Parquet and Arrow files on S3 pass through a temporary file.

    Raises:
        DataError: a Parquet or Arrow file that is not one, or is cut off.
    """
    if uri.endswith((".jsonl", ".jsonl.gz")):
        with store.open_read(uri) as stream:
            yield from read_lines(uri, stream)
        return
    with tempfile.TemporaryDirectory(prefix="ratchet-prepare-") as directory:
        path = Path(uri)
        if store.is_s3(uri):
            path = Path(directory, "rows")
            store.download_file(uri, path)
        yield from _read_table(uri, path)


def _read_table(uri: str, path: Path) -> Iterator[Row]:
    line = 0
    try:
        for batch in _parquet_batches(path) if uri.endswith(".parquet") else _arrow_batches(path):
            for fields in batch.to_pylist():
                line += 1
                yield Row(uri, line, fields)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"source {uri}: cannot be read after row {line}: {str(error).splitlines()[0]}") from None


def _parquet_batches(path: Path) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(path) as file:
        yield from file.iter_batches(batch_size=ROWS_PER_BATCH)


def _arrow_batches(path: Path) -> Iterator[pa.RecordBatch]:
    with pa.memory_map(str(path)) as mapped, pa.ipc.open_stream(mapped) as stream:
        for batch in stream:
            yield from (batch.slice(start, ROWS_PER_BATCH) for start in range(0, batch.num_rows, ROWS_PER_BATCH))
