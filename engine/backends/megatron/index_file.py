"""The index of a distributed checkpoint is a pickle, which could run anything: read by a list of what it may hold."""

import dataclasses
import enum
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from engine.errors import ModelError

INDEX = ".metadata"
_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem",
            "torch.distributed.checkpoint.planner")
"""Their data classes and enumerations, nothing else of them."""
_FUNCTIONS = {("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"),
              ("builtins", "set")}


def check_index(directory: Path) -> None:
    """Read the index as Megatron will, but nothing that could do more than describe tensors.

    Raises:
        ModelError: it holds something else.
    """
    path = directory / INDEX
    with open(path, "rb") as file:
        try:
            _check(_Reader(file).load())
        except (pickle.UnpicklingError, AttributeError, TypeError) as error:
            raise ModelError(f"checkpoint {path}: {error}; it is not loaded, since it could run code") from None


def _check(index: Any) -> None:
    """Refuse what torch would read as something else than tensors, or from elsewhere than the checkpoint.

    Megatron's layers have an extra state, which is empty without Transformer Engine: nothing else may be of bytes.
    """
    if not type(index.state_dict_metadata) is type(index.storage_data) is dict:
        raise pickle.UnpicklingError("is no table")
    for key, entry in index.state_dict_metadata.items():
        extra = type(entry) is BytesStorageMetadata and "._extra_state/" in key and not vars(entry)
        if not extra and type(entry) is not TensorStorageMetadata:
            raise pickle.UnpicklingError(f"{key} is no tensor")
    for place in index.storage_data.values():
        if type(place) is not _StorageInfo or place.transform_descriptors or not _is_name(place.relative_path):
            raise pickle.UnpicklingError(f"names the place {str(place)[:200]}")


def _is_name(path: Any) -> bool:
    return type(path) is str and "/" not in path and path not in ("", ".", "..")


class _Reader(pickle.Unpickler):  # noqa: S301 - it finds only what is listed
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _FUNCTIONS or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        if module in _MODULES:
            found = getattr(sys.modules.get(module), name, None)
            own = isinstance(found, type) and found.__module__ == module
            if own and (dataclasses.is_dataclass(found) or issubclass(found, enum.Enum)):
                return found
        raise pickle.UnpicklingError(f"holds {module}.{name}, which no index does")
