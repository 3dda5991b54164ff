"""Hugging Face files into any sharding: each rank reads only its slices."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.resharding.boxes import full_box, relative, volume
from engine.resharding.messages import split_box
from engine.resharding.safetensors_files import Entry, map_tensors, read_entries
from engine.resharding.sharding import Holdings
from engine.resharding.views import check_params, view_of

_IGNORED = ("rotary_emb.inv_freq",)
"""Buffers that old checkpoints hold and that are computed from the configuration."""
_READ_ELEMENTS = 16 << 20
"""Elements copied at a time: bounds the memory of a cast."""


@torch.no_grad()
def load_hf(model_dir: str | Path, holdings: Holdings, params: Mapping[str, Tensor]) -> None:
    """Fill a rank's parameters from a Hugging Face directory, cast to their dtype; padding becomes zero.

    Args:
        model_dir: safetensors, one file or several with an index.
        holdings: what the rank holds, `sharding.holdings(rank)`.
        params: its parameters by name, written in place. A critic's value head is left as it is.
    Raises:
        ModelError: a file is missing, truncated or corrupt, or a tensor is missing, unknown or of another shape; names
            file, tensor, expected and found.
        LayoutError: a parameter is not what the holdings say.
    """
    check_params(holdings, params)
    entries = checked_entries(model_dir, holdings)
    sources = map_tensors({name: entries[name] for name in holdings.by_tensor})
    _clear_padding(holdings, params)
    for piece in holdings.pieces:
        source, shape = sources[piece.tensor], entries[piece.tensor].shape
        for box in split_box(piece.box, _READ_ELEMENTS):
            view_of(params[piece.param], piece, box).copy_(source[relative(box, full_box(shape))])


def checked_entries(model_dir: str | Path, holdings: Holdings, may_lack: tuple[str, ...] = ()) -> dict[str, Entry]:
    """The files' tensors, after comparing all of them with the catalog.

    Args:
        may_lack: tensors of the catalog that the files need not have.
    Raises:
        ModelError: as `load_hf`.
    """
    entries = read_entries(model_dir)
    for name, tensor in holdings.tensors.items():
        if name not in entries and name in may_lack:
            continue
        if name not in entries:
            raise ModelError(f"model {model_dir}: tensor {name} with shape {tensor.shape} is missing from its files")
        if entries[name].shape != tensor.shape:
            raise ModelError(f"model file {entries[name].file}: tensor {name} has shape {entries[name].shape}, "
                             f"config.json makes it {tensor.shape}")
    unknown = [name for name in entries if name not in holdings.tensors and not _may_be_left(name)]
    if unknown:
        raise ModelError(f"model file {entries[unknown[0]].file}: tensor {unknown[0]} (and {len(unknown) - 1} more) is "
                         f"not part of the architecture; loading would lose it")
    return entries


def _may_be_left(name: str) -> bool:
    # lm_head: a tied model's second name of the embedding, or the head a critic does without.
    return name == "lm_head.weight" or name.endswith(_IGNORED)


def _clear_padding(holdings: Holdings, params: Mapping[str, Tensor]) -> None:
    covered: dict[str, int] = {}
    for piece in holdings.pieces:
        covered[piece.param] = covered.get(piece.param, 0) + volume(piece.box)
    for name in holdings.params:
        if covered.get(name, 0) < params[name].numel():
            params[name].detach().zero_()
