"""Any sharding into a Hugging Face directory, whole or not at all."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import FaultError
from engine.resharding.catalog import SCORE
from engine.resharding.execute import SyncOptions, WeightSync
from engine.resharding.huggingface import FileSharding
from engine.resharding.load import checked_entries
from engine.resharding.placement import PAPER_CLUSTER, Placement
from engine.resharding.plan import plan_rank
from engine.resharding.safetensors_files import INDEX, SINGLE, Entry, Size, create_file
from engine.resharding.sharding import Holdings, Sharding
from engine.resharding.wire import Wire

_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")


@dataclass(frozen=True)
class ExportOptions:
    """How a model is written; equal on all ranks."""

    max_file_bytes: int = 4 << 30
    """A file holds no more, except for a single larger tensor."""
    placement: Placement = PAPER_CLUSTER
    """Ranks of rank 0's node write: they see its disk."""
    sync: SyncOptions = SyncOptions()


@dataclass(frozen=True)
class _File:
    name: str
    writer: int
    tensors: tuple[str, ...]


def export_hf(model_dir: str | Path, out_dir: str | Path, sharding: Sharding, params: Mapping[str, Tensor],
              options: ExportOptions = ExportOptions()) -> None:
    """Write the model as a Hugging Face directory. Collective over the default process group.

    Weights get the dtypes of `model_dir`'s files, so that what was not trained is written byte for byte as it was;
    tied embeddings once, without vocabulary padding; a reward model's head beside its backbone. Configuration,
    tokenizer and everything else that is not weights is copied from there. Files are filled in place as slices arrive:
    no rank holds a tensor it has no part of, and the memory of a transfer is one bucket. The directory appears whole,
    under its name, or not at all; one that exists is replaced.

    Args:
        model_dir: the Hugging Face directory the model started from, readable by every rank.
        out_dir: the directory to write, on a disk of rank 0's node.
        sharding: how the ranks hold the model.
        params: this rank's parameters by name.
    Raises:
        ModelError: `model_dir` does not describe the model that `sharding` holds.
        FaultError: the disk refuses.
        ReshardError: a rank is gone.
    """
    wire, out_dir = Wire(None, options.sync.timeout_s), Path(out_dir)
    holdings = sharding.holdings(wire.rank)
    sizes = _sizes(checked_entries(model_dir, holdings, may_lack=(SCORE,)), holdings)
    writers = [rank for rank in range(wire.size) if options.placement.node(rank) == options.placement.node(0)]
    files = _divide(sizes, options.max_file_bytes, writers)
    # One name for all ranks, and another for every attempt: a dead attempt's leftovers are never mixed in.
    attempt = wire.gather({"pid": os.getpid()})[0]["pid"]
    partial = out_dir.with_name(f".{out_dir.name}.partial-{attempt}")
    if wire.rank == 0:
        _start_directory(model_dir, partial)
    wire.agree("creation of the export directory")
    _write_weights((sharding, params), (partial, files, sizes), options)
    wire.agree("writing of the exported files")
    if wire.rank == 0:
        _finish_directory(partial, out_dir, files, sizes)
    wire.agree("naming of the export directory")


def _sizes(entries: Mapping[str, Entry], holdings: Holdings) -> dict[str, Size]:
    """dtype and shape of each tensor to write; a head that the files do not have gets the dtype of its neighbours."""
    first = next(iter(entries.values()))
    return {name: (entries.get(name, first).dtype, tensor.shape) for name, tensor in holdings.tensors.items()}


def _divide(sizes: Mapping[str, Size], max_bytes: int, writers: list[int]) -> list[_File]:
    """Consecutive tensors into files, files to writers in turn."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, (dtype, shape) in sizes.items():
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if groups[-1] and filled + num_bytes > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += num_bytes
    count = len(groups)
    names = [SINGLE] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    return [_File(name, writers[i % len(writers)], tuple(group))
            for i, (name, group) in enumerate(zip(names, groups, strict=True))]


def _write_weights(source: tuple[Sharding, Mapping[str, Tensor]], target: tuple[Path, list[_File], Mapping],
                   options: ExportOptions) -> None:
    (sharding, params), (directory, files, sizes) = source, target
    wire = Wire(None, options.sync.timeout_s)
    destination = FileSharding(sharding.tensors, {name: file.writer for file in files for name in file.tensors})
    mapped: dict[str, Tensor] = {}
    own = [file for file in files if file.writer == wire.rank]
    for file in own:
        try:
            mapped |= create_file(directory / file.name, {name: sizes[name] for name in file.tensors})
        except OSError as error:
            raise FaultError(f"export {directory / file.name}: cannot be written ({error.strerror})") from error
    plan = plan_rank(sharding, destination, wire.rank, options.placement)
    WeightSync(plan, params, mapped, None, options.sync).run(0)
    mapped.clear()
    for file in own:
        _flush(directory / file.name)


def _start_directory(model_dir: str | Path, directory: Path) -> None:
    for leftover in directory.parent.glob(f"{directory.name.rsplit('-', 1)[0]}-*"):
        shutil.rmtree(leftover)
    directory.mkdir(parents=True)
    for file in Path(model_dir).iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHT_FILES):
            shutil.copyfile(file, directory / file.name)


def _finish_directory(partial: Path, out_dir: Path, files: list[_File], sizes: Mapping[str, Size]) -> None:
    if len(files) > 1:
        total = sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in sizes.values())
        index = {"metadata": {"total_size": total},
                 "weight_map": {name: file.name for file in files for name in file.tensors}}
        (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    for file in partial.iterdir():
        _flush(file)
    _flush(partial)
    replaced = out_dir.with_name(f".{out_dir.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if out_dir.exists():
        out_dir.rename(replaced)
    partial.rename(out_dir)
    _flush(out_dir.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _flush(path: Path) -> None:
    """Wait until a file's data, or a directory's names, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
