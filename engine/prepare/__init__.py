"""The prepare stage: files of prompts, demonstrations and pairs in, checked and tokenised Parquet shards out.

Rows are streamed: besides one batch and one row group, memory holds 16 bytes (in a Python set, about 100) a prompt, the
digests by which repeated and overlapping rows are found. Held-out sets are read first. A training row that asks the
same, whatever its system message, is bad; rows that this stage generates itself are drawn again instead.
"""

import contextlib
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from engine import store
from engine.errors import ModelError, SpecError
from engine.job import Job
from engine.prepare.rendering import TOKENIZER_FILES, Renderer
from engine.prepare.sets import PromptSetBuilder
from engine.prepare.sources import source_files
from engine.prepare.writing import Quarantine, ShardWriter
from engine.spec import FileSource, PrepareSpec, PromptSetSpec, RunResult, hash_spec

UNFINISHED = "prepare-unfinished"
"""An object that stands beside an output on S3 before its first file and until its manifest: what is there is ours."""
REPLACED = ".replaced"
"""Ending of the name that an older local output has until it is removed."""


def run(job: Job, spec: PrepareSpec) -> RunResult:
    """Prepare all sets, or find them already prepared from the same spec and sources.

    Raises:
        DataError: too many bad rows, no rows left, or sources that cannot be read. ModelError: no tokenizer, or no
            chat template for chat prompts. StoreError: a store that does not answer.
    """
    started = time.monotonic()
    fingerprints: dict[str, Any] = {name: _fingerprint(source) for name, source in spec.sets.items()}
    fingerprints["tokenizer"] = _fingerprint_tokenizer(spec.tokenizer)
    manifest = _whole_output(spec, fingerprints)
    if manifest is None:
        manifest = _prepare(job, spec, fingerprints)
    else:
        job.event("unchanged", output=spec.output)
    return _result(spec, manifest, time.monotonic() - started)


def _prepare(job: Job, spec: PrepareSpec, fingerprints: dict[str, Any]) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        staged = _staging_directory(job, spec)
        stack.callback(shutil.rmtree, staged, ignore_errors=True)
        renderer = Renderer(_local_tokenizer(spec, stack), spec)
        quarantine = Quarantine(job.dir / Quarantine.FILE)
        stack.callback(quarantine.close)
        sets: dict[str, Any] = {}
        held_out: set[bytes] = set()
        for name, source in spec.sets.items():
            writer = ShardWriter(staged, name, spec.rows_per_shard)
            is_held_out = name.endswith("eval")
            builder = PromptSetBuilder(name, renderer, writer, quarantine, None if is_held_out else held_out)
            builder.read(source, lambda rows, bad, name=name: job.progress(
                f"prepare {name}", rows=rows, bad=bad))
            sets[name] = builder.finish(spec.max_bad_share) | {
                "sources": [_with_hash(entry) for entry in fingerprints[name]]}
            held_out |= builder.asked
        quarantine.close()
        shutil.copyfile(quarantine.path, staged / Quarantine.FILE)
        manifest = {
            "schema_version": 1, "spec_sha256": hash_spec(spec), "sets": sets,
            "tokenizer": {"sha256": renderer.sha256, "files": fingerprints["tokenizer"]},
            "quarantine": {"name": Quarantine.FILE, "sha256": store.sha256_file(quarantine.path)}}
        store.write_atomic(staged / store.MANIFEST, json.dumps(manifest, indent=1, sort_keys=True) + "\n")
        _publish(staged, spec.output)
    return manifest


def _staging_directory(job: Job, spec: PrepareSpec) -> Path:
    """An empty directory beside the output (a rename must not cross file systems); a killed attempt's is removed.

    Raises:
        SpecError: the output is something that this stage did not make.
    """
    ours = [store.MANIFEST, *([UNFINISHED] if store.is_s3(spec.output) else [])]
    if store.exists(spec.output) and not any(store.exists(store.join(spec.output, name)) for name in ours):
        raise SpecError(f"output: {spec.output} is not empty and no earlier output of prepare; choose another place")
    name = f".{store.join(spec.output).rsplit('/', 1)[-1]}.partial"
    staged = job.dir / name if store.is_s3(spec.output) else Path(spec.output).absolute().parent / name
    for leftover in (staged, staged.with_suffix(REPLACED)):
        shutil.rmtree(leftover, ignore_errors=True)
    staged.mkdir(parents=True)
    return staged


def _local_tokenizer(spec: PrepareSpec, stack: contextlib.ExitStack) -> Path:
    if not store.is_s3(spec.tokenizer):
        if not Path(spec.tokenizer).is_dir():
            raise ModelError(f"tokenizer {spec.tokenizer}: no such directory")
        return Path(spec.tokenizer)
    path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ratchet-tokenizer-")), "tokenizer")
    for name in TOKENIZER_FILES:
        if store.exists(store.join(spec.tokenizer, name)):
            store.download_file(store.join(spec.tokenizer, name), path / name)
    return path


def _publish(staged: Path, output: str) -> None:
    """Make the output visible: locally by a rename, on S3 by its manifest. An older output is replaced whole."""
    if store.is_s3(output):
        store.write_bytes(store.join(output, UNFINISHED), b"")
        store.delete(store.join(output, store.MANIFEST))
        for name in {name.split("/")[0] for name in store.list_files(output)} - {UNFINISHED}:
            store.delete(store.join(output, name))
        store.upload_dir(staged, output)
        store.delete(store.join(output, UNFINISHED))
        return
    replaced = staged.with_suffix(REPLACED)
    if os.path.exists(output):
        os.replace(output, replaced)
    os.replace(staged, output)
    store.sync_directory(staged.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _fingerprint(spec: PromptSetSpec) -> list[dict[str, str]]:
    """What the manifest keeps of the files a set was made from: a change of any is a change of the set.

    Raises:
        DataError: a source that is not there.
    """
    return [{"uri": uri, "content": store.fingerprint(uri)}
            for source in spec.sources if isinstance(source, FileSource) for uri in source_files(source)]


def _with_hash(entry: dict[str, str]) -> dict[str, str]:
    """A file's entry with its sha256: a store's own tag says that it changed, not which file it is."""
    kind, _, value = entry["content"].partition(":")
    return entry | {"sha256": value if kind == "sha256" else store.sha256(entry["uri"])}


def _fingerprint_tokenizer(directory: str) -> list[dict[str, str]]:
    return [{"uri": uri, "content": store.fingerprint(uri)}
            for name in TOKENIZER_FILES if store.exists(uri := store.join(directory, name))]


def _whole_output(spec: PrepareSpec, fingerprints: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest of an output that this very spec made of these very sources and that is whole, or None."""
    path = store.join(spec.output, store.MANIFEST)
    if not store.exists(path):
        return None
    manifest = json.loads(store.read_text(path))
    if manifest.get("spec_sha256") != hash_spec(spec):
        return None
    sets = manifest["sets"]
    if manifest["tokenizer"]["files"] != fingerprints["tokenizer"]:
        return None
    made_of = {name: [{key: entry[key] for key in ("uri", "content")} for entry in sets[name]["sources"]]
               for name in spec.sets}
    if any(made_of[name] != fingerprints[name] for name in spec.sets):
        return None
    files = [file for name in spec.sets for file in sets[name]["files"]] + [manifest["quarantine"]]
    whole = all(_has_content(store.join(spec.output, file["name"]), file["sha256"]) for file in files)
    return manifest if whole else None


def _has_content(uri: str, sha256: str) -> bool:
    return store.exists(uri) and store.sha256_bytes(store.read_bytes(uri)) == sha256


def _result(spec: PrepareSpec, manifest: dict[str, Any], seconds: float) -> RunResult:
    sets = manifest["sets"]
    return RunResult(
        stage="prepare",
        outputs={"prompts": spec.output, "quarantine": store.join(spec.output, Quarantine.FILE)},
        metrics={f"{name}/{count}": value for name in sets for count, value in sets[name]["counts"].items()},
        hashes={"spec": manifest["spec_sha256"], "tokenizer": manifest["tokenizer"]["sha256"],
                **{f"prompts/{name}": sets[name]["sha256"] for name in sets}},
        timings_s={"prepare": seconds})
