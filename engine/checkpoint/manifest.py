"""The manifest of a checkpoint directory: what it must hold, byte for byte. Written last, read first."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from engine.store import MANIFEST, sha256_file, write_atomic
from engine.store import sync_directory as sync

FORMAT = 2
PARALLEL_FILES = 4


def write_manifest(directory: Path, about: dict[str, Any]) -> None:
    """Hash and sync every file below `directory` and list them in its manifest.

    Args:
        directory: complete but for the manifest.
        about: what readers want to know without opening other files; plain JSON.
    """
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    names = [path.relative_to(directory).as_posix() for path in files]
    with ThreadPoolExecutor(PARALLEL_FILES) as pool:
        entries = dict(zip(names, pool.map(_seal, files), strict=True))
    for folder in {path.parent for path in files}:
        sync(folder)
    write_atomic(directory / MANIFEST, json.dumps({"format": FORMAT, **about, "files": entries}, indent=1))


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a directory whose files are all as it says.

    Raises:
        ValueError: one line that says which file is missing, of another size or of other content.
    """
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{MANIFEST} cannot be read: {error}") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise ValueError(f"{MANIFEST} cannot be read: it lists no files")
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{MANIFEST} is of format {manifest.get('format')}, this version reads {FORMAT}")
    with ThreadPoolExecutor(PARALLEL_FILES) as pool:
        for problem in pool.map(lambda item: _problem(directory, *item), manifest["files"].items()):
            if problem:
                raise ValueError(problem)
    return manifest


def _seal(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}


def _problem(directory: Path, name: str, entry: dict[str, Any]) -> str | None:
    path = directory / name
    try:
        size = path.stat().st_size
    except OSError:
        return f"{name} is missing"
    if size != entry["bytes"]:
        return f"{name} has {size} bytes, the manifest says {entry['bytes']}"
    try:
        sha256 = sha256_file(path)
    except OSError as error:
        return f"{name} cannot be read: {error.strerror or error}"
    return None if sha256 == entry["sha256"] else f"{name} has another content than the manifest says"
