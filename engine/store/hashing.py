"""sha256 of bytes, files and directories: what manifests and lineage tags are made of."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from engine.errors import ModelError


def sha256_bytes(data: bytes) -> str:
    """sha256 of `data`, hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: str | Path) -> str:
    """sha256 of a local file's content, hexadecimal; memory does not grow with the file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_dir(directory: str | Path, names: Iterable[str] | None = None) -> str:
    """sha256 over names and contents of local files, in name order.

    Args:
        directory: where the files are.
        names: relative paths; None: all files of the directory.
    """
    root = Path(directory)
    if names is None:
        names = (path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    digest = hashlib.sha256()
    for name in sorted(names):
        digest.update(f"{name}\0{sha256_file(root / name)}\n".encode())
    return digest.hexdigest()


def hash_model_dir(directory: str | Path) -> str:
    """sha256 over the weight files (`*.safetensors`) of a Hugging Face directory: what a model version is known by.

    Raises:
        ModelError: the directory has no safetensors file.
    """
    names = [path.name for path in Path(directory).glob("*.safetensors")]
    if not names:
        raise ModelError(f"model {directory}: no *.safetensors files to hash")
    return hash_dir(directory, names)
