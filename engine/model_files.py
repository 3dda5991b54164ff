"""A model's files on this machine, whatever its URI. Every rank calls it."""

from pathlib import Path

import torch.distributed as dist

from engine import store
from engine.ranks import patient_group


def local_model(uri: str, target: Path, rank: int) -> Path:
    """The Hugging Face directory of a model; one in an object store is downloaded once for all ranks.

    Args:
        uri: a path that all ranks share, or `s3://`.
        target: where a download goes; what is there already is taken.
        rank: of this process.
    Raises:
        MissingError, StoreError: it cannot be downloaded.
    """
    if not store.is_s3(uri):
        return Path(uri)
    if rank == 0 and not target.exists():
        store.download_dir(uri, target)
    dist.barrier(patient_group())
    return target
