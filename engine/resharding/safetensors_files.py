"""Safetensors files of a Hugging Face directory as memory: headers checked, tensors mapped, nothing read beforehand."""

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import ModelError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LARGEST_HEADER = 100 << 20


Size = tuple[torch.dtype, tuple[int, ...]]
"""dtype and shape of a tensor."""


@dataclass(frozen=True)
class Entry:
    """A tensor in a file."""

    file: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """First byte in the file."""

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def read_entries(model_dir: str | Path) -> dict[str, Entry]:
    """Every tensor of the model in a Hugging Face directory, from the headers only.

    Raises:
        ModelError: no safetensors, a file of the index missing, or a file truncated or corrupt; names file and tensor.
    """
    directory = Path(model_dir)
    index = directory / INDEX
    if not index.exists():
        return _read_header(directory / SINGLE)
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        files = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"model file {index}: not an index of safetensors files ({error})") from None
    entries: dict[str, Entry] = {}
    for file in files:
        entries |= _read_header(directory / file)
    for name, file in weight_map.items():
        if name not in entries:
            raise ModelError(f"model file {directory / file}: has no tensor {name}, which {INDEX} says it holds")
    return entries


def _read_header(file: Path) -> dict[str, Entry]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length, = struct.unpack("<Q", stream.read(8))
            if length > min(size - 8, _LARGEST_HEADER):
                raise ModelError(
                    f"model file {file}: header of {length} bytes in a file of {size}; truncated or corrupt")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        return {name: _entry(file, name, fields, (8 + length, size)) for name, fields in header.items()}
    except OSError as error:
        raise ModelError(f"model file {file}: cannot be read ({error.strerror}); the model needs it") from None
    except (struct.error, ValueError, AttributeError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"model file {file}: not a safetensors file ({error})") from None


def _entry(file: Path, name: str, fields: dict, limits: tuple[int, int]) -> Entry:
    base, size = limits
    try:
        dtype, shape, (start, stop) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise ModelError(f"model file {file}: tensor {name} has a broken header entry {fields!r}") from None
    if dtype not in _DTYPES:
        raise ModelError(f"model file {file}: tensor {name} has dtype {dtype}; supported are {', '.join(_DTYPES)}")
    entry = Entry(file, name, _DTYPES[dtype], shape, base + start)
    if stop - start != entry.num_bytes:
        raise ModelError(f"model file {file}: tensor {name} of shape {shape} and dtype {dtype} needs {entry.num_bytes} "
                         f"bytes, the header gives it {stop - start}")
    if base + stop > size:
        raise ModelError(f"model file {file}: truncated; tensor {name} ends at byte {base + stop}, the file at {size}")
    return entry


def map_tensors(entries: Mapping[str, Entry]) -> dict[str, Tensor]:
    """The tensors as views of the mapped files: pages are read when they are touched. Not to be written to."""
    files = {entry.file: _map_file(entry.file, writable=False) for entry in entries.values()}
    return {name: _view(files[entry.file], entry) for name, entry in entries.items()}


def _map_file(file: Path, *, writable: bool) -> Tensor:
    return torch.from_file(str(file), shared=writable, size=file.stat().st_size, dtype=torch.uint8)


def _view(mapped: Tensor, entry: Entry) -> Tensor:
    data = mapped[entry.start:entry.start + entry.num_bytes]
    if entry.start % entry.dtype.itemsize:
        data = data.clone()  # old writers did not align the data
    return data.view(entry.dtype).view(entry.shape)


def create_file(file: Path, tensors: Mapping[str, Size]) -> dict[str, Tensor]:
    """Create a safetensors file of zeros and return its tensors mapped: writing to one writes the file.

    The disk's space is taken here: a page of a sparse file that finds the disk full would end the process (SIGBUS).

    Raises:
        OSError: the disk is full, or not to be written to.
    """
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, (dtype, shape) in tensors.items():
        stop = start + prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.flush()
        os.posix_fallocate(stream.fileno(), 0, 8 + len(text) + start)
    mapped, views = _map_file(file, writable=True), {}
    for name, (dtype, shape) in tensors.items():
        first = 8 + len(text) + header[name]["data_offsets"][0]
        views[name] = _view(mapped, Entry(file, name, dtype, shape, first))
    return views
