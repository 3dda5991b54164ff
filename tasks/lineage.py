"""Lineage: what a model came from, and which models came of a file.

`register` writes `lineage.json` beside the run's other files and to its MLflow run, and tags that run with the sha256
of every data file, so the way back is a search. From the command line, with MLFLOW_TRACKING_URI set:

    python -m tasks.lineage MODEL[/VERSION|/ALIAS] [--html FILE | --json]
    python -m tasks.lineage --file PATH|s3://URI|SHA256 [--html FILE | --json]
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

import engine
from engine import store
from engine.errors import FaultError, MissingError, RefusedError, SpecError
from engine.spec import RunResult, hash_spec
from engine.spec.base import Spec
from engine.spec.job import SPEC_FILE
from tasks import deployment, jobs, lineage_page, registry, registry_search, runs, stages, tracking
from tasks.pipeline import Pipeline
from tasks.registry import Version

LINEAGE_FILE = "lineage.json"
ARTIFACTS = "lineage"
"""Folder of the MLflow run's artifacts that holds the copy."""
FILE_TAG = "ratchet.file."
"""Followed by a data file's sha256: a tag of the run that read it; the sets it went into and its URI."""
LONGEST_CHAIN = 1000


class DataFile(Spec):
    """A file that a set of prompts was made from."""

    uri: str
    sha256: str = ""
    """Empty when the manifest does not say it (an S3 object, prepared by an earlier version)."""


class PromptSet(Spec):
    """One prepared set."""

    rows: int
    sha256: str
    files: list[DataFile]
    generated: list[dict[str, Any]] = []
    """Generators and their seeds, as the pipeline says them."""


class Prompts(Spec):
    """What prepare made."""

    uri: str
    manifest_sha256: str
    tokenizer_sha256: str
    sets: dict[str, PromptSet]


class Checkpoint(Spec):
    """One that was there when the version was registered: a stage keeps its newest and its best."""

    uri: str
    step: int
    manifest_sha256: str


class Job(Spec):
    """One engine job."""

    directory: str
    stage: str
    spec_sha256: str
    mlflow_run_id: str = ""
    policy_version: int = 0
    gpu_seconds: float = 0.0
    hashes: dict[str, str] = {}
    outputs: dict[str, str] = {}
    metrics: dict[str, float] = {}
    checkpoints: list[Checkpoint] = []


class Code(Spec):
    """What ran."""

    version: str
    git_sha: str = ""
    """Empty outside a checkout, `-dirty` at its end when files differed from it."""
    source_sha256: str
    """Of every Python file of the pipeline and the engine: images have no commit."""


class LineageFile(Spec):
    """Everything a registered version came from."""

    schema_version: Literal[1] = 1
    model: str
    version: str
    export_uri: str
    weights_hash: str
    dag_id: str
    run_id: str
    preset: str
    run_uri: str
    """Where the run keeps its files: `run.json` there is its whole pipeline."""
    mlflow_run_id: str
    mlflow_url: str
    code: Code
    pipeline_sha256: str
    base_model: str
    """URI of the model that training started from."""
    base_version: str = ""
    """`name/3` when that was the champion."""
    prompts: Prompts
    jobs: dict[str, Job]
    """By task id, those that had a result."""


class Step(Spec):
    """One model of a chain: the version asked for, then what it started from, and so on."""

    label: str
    """`name/3`, or the URI of a model that is in no registry."""
    state: str = ""
    """Aliases and status in the registry now."""
    lineage: LineageFile | None = None
    there: dict[str, bool] = {}
    """Whether the export, the prompts and each checkpoint are still there."""
    note: str = ""


class Sighting(Spec):
    """A model that saw a file."""

    label: str
    state: str
    how: str
    """`train`: it was trained on rows of this file; `eval`: it was evaluated on them; `through name/3`."""
    run: str


def record(file: runs.RunFile, version: Version) -> LineageFile:
    """Write the lineage of a version that was just registered: beside the run's files, to MLflow, as tags."""
    root = runs.run_root(file.dag_id, file.run_id)
    parts = [stages.stage_name(k) for k in range(1, file.pipeline.stages.count + 1)]
    tasks = ["prepare", *file.pipeline.finetuned, *(f"{part}.{job}" for part in parts for job in ("train", "evaluate"))]
    found = LineageFile(
        model=version.model, version=version.version, export_uri=version.export_uri, weights_hash=version.weights_hash,
        dag_id=file.dag_id, run_id=file.run_id, preset=file.preset, run_uri=root,
        mlflow_run_id=file.tracking.run_id or "", mlflow_url=tracking.run_url(file.tracking),
        code=Code(version=engine.__version__, git_sha=tracking.git_sha(), source_sha256=tracking.source_hash()),
        pipeline_sha256=hash_spec(file.pipeline), base_model=file.base_model, base_version=file.base_version,
        prompts=_prompts(file.pipeline, stages.prompts_uri(root)),
        jobs={task: job for task in tasks if (job := _job(file, task))})
    text = found.model_dump_json(indent=1)
    store.write_bytes(store.join(root, LINEAGE_FILE), text)
    tracking.log_text(file.tracking, text, f"{ARTIFACTS}/{LINEAGE_FILE}")
    tracking.set_tags(file.tracking, file_tags(found.prompts) | {
        "ratchet.data_hash": found.prompts.manifest_sha256, "ratchet.source_hash": found.code.source_sha256})
    page = lineage_page.Chain(ancestry(version.model, version.version)).html()
    tracking.log_text(file.tracking, page, f"{ARTIFACTS}/lineage.html")
    return found


def file_tags(prompts: Prompts) -> dict[str, str]:
    """The tags by which a run is found from a data file: `train,sft s3://bucket/rows.jsonl`."""
    sets: dict[str, tuple[list[str], str]] = {}
    for name, made in prompts.sets.items():
        for file in made.files:
            if file.sha256:
                sets.setdefault(file.sha256, ([], file.uri))[0].append(name)
    return {f"{FILE_TAG}{sha256}": f"{','.join(names)} {uri}" for sha256, (names, uri) in sets.items()}


def ancestry(model: str, alias_or_version: str) -> list[Step]:
    """The version, what it was trained from, and so on to a model that no run made.

    Raises:
        SpecError: the registry has no such version. FaultError: MLflow or the store does not answer.
    """
    version = registry.read(model, alias_or_version)
    if version is None:
        raise SpecError(f"the registry has no {model}/{alias_or_version}")
    steps: list[Step] = []
    while version is not None and len(steps) < LONGEST_CHAIN:
        steps.append(_step(version))
        made = steps[-1].lineage
        if made is None:
            break
        name, _, number = made.base_version.rpartition("/")
        version = registry.read(name, number) if made.base_version else None
        if version is None:
            steps.append(Step(label=made.base_version or made.base_model, note="not in the registry"))
    return steps


def seen_by(sha256: str) -> list[Sighting]:
    """The registered versions whose run read a file with this content, and those trained from them, in that order."""
    versions = registry_search.every_version()
    by_run: dict[str, list[Version]] = {}
    for version in versions:
        by_run.setdefault(version.run_id, []).append(version)
    found: dict[str, Sighting] = {}
    queue = []
    for run_id, value in registry_search.runs_with_tag(f"{FILE_TAG}{sha256}").items():
        for version in by_run.get(run_id, ()):
            found[version.label] = _sighting(version, value.split(" ")[0].replace(",", ", "))
            queue.append(version)
    while queue:
        base = queue.pop(0)
        for name in filter(None, (base.label, base.export_uri)):
            for run_id in registry_search.runs_with_tag("ratchet.base_model", name):
                new = [v for v in by_run.get(run_id, ()) if v.label not in found]
                found |= {v.label: _sighting(v, f"through {base.label}") for v in new}
                queue += new
    return list(found.values())


def content_hash(file: str) -> str:
    """The sha256 that `file` says or, as a path or URI, has.

    Raises:
        MissingError: no such file.
    """
    if re.fullmatch(r"[0-9a-fA-F]{64}", file):
        return file.lower()
    if not store.is_s3(file) and not Path(file).is_file():
        raise MissingError(f"{file}: no such file, and not the 64 digits of a sha256")
    return store.sha256(file)


def _prompts(pipeline: Pipeline, uri: str) -> Prompts:
    text = store.read_bytes(store.join(uri, store.MANIFEST))
    manifest = json.loads(text)
    sets = {}
    for name, made in manifest["sets"].items():
        files = [DataFile(uri=source["uri"], sha256=source.get("sha256") or _sha256_in(source["content"]))
                 for source in made["sources"]]
        asked = pipeline.prepare.get(name) or {}
        sets[name] = PromptSet(rows=made["rows"], sha256=made["sha256"], files=files, generated=[
            source for source in asked.get("sources", ()) if source.get("kind") != "file"])
    return Prompts(uri=uri, manifest_sha256=store.sha256_bytes(text), tokenizer_sha256=manifest["tokenizer"]["sha256"],
                   sets=sets)


def _sha256_in(content: str) -> str:
    kind, _, value = content.partition(":")
    return value if kind == "sha256" else ""


def _job(file: runs.RunFile, task: str) -> Job | None:
    directory = jobs.job_directory(deployment.home(), file.dag_id, file.run_id, task)
    result, spec = jobs.read_result(directory), jobs.read_json(directory / SPEC_FILE)
    if result is None or spec is None:
        return None
    return Job(
        directory=str(directory), stage=result.stage, spec_sha256=store.sha256_file(directory / SPEC_FILE),
        mlflow_run_id=(spec.get("tracking") or {}).get("run_id") or "", policy_version=result.policy_version,
        gpu_seconds=result.gpu_seconds, hashes=result.hashes, outputs=result.outputs, metrics=_finite(result),
        checkpoints=list(_checkpoints(spec.get("checkpoint_dir"))))


def _finite(result: RunResult) -> dict[str, float]:
    # JSON has no NaN: pydantic would write null and not read it again.
    return {name: value for name, value in result.metrics.items() if value == value and abs(value) != float("inf")}


def _checkpoints(uri: str | None) -> Iterator[Checkpoint]:
    for name in store.list_dirs(uri) if uri else ():
        manifest = store.join(uri or "", name, store.MANIFEST)
        if name.startswith("step-") and store.exists(manifest):
            text = store.read_bytes(manifest)
            yield Checkpoint(uri=store.join(uri or "", name), step=json.loads(text)["step"],
                             manifest_sha256=store.sha256_bytes(text))


def _step(version: Version) -> Step:
    found = _read(version)
    if found is None:
        return Step(label=version.label, state=_state(version), note="registered by a version of Ratchet that wrote no "
                                                                     "lineage; its tags are in MLflow")
    places = [found.export_uri, found.prompts.uri, *(c.uri for job in found.jobs.values() for c in job.checkpoints)]
    return Step(label=version.label, state=_state(version), lineage=found,
                there={uri: store.exists(uri) for uri in places})


def _read(version: Version) -> LineageFile | None:
    """From the run's files or, when they are gone, from MLflow."""
    where = store.join(version.tags.get("ratchet.run", ""), LINEAGE_FILE)
    text: str | None
    try:
        text = store.read_text(where)
    except FaultError:
        text = tracking.read_text(version.run_id, f"{ARTIFACTS}/{LINEAGE_FILE}")
    try:
        found = LineageFile.model_validate_json(text) if text else None
    except ValidationError:
        raise SpecError(f"{where}: from another version of Ratchet; read it with that one") from None
    # A run may have registered two versions: the file is the last one's.
    return found if found and found.version == version.version else None


def _sighting(version: Version, how: str) -> Sighting:
    return Sighting(label=version.label, state=_state(version), how=how, run=version.tags.get("ratchet.run", ""))


def _state(version: Version) -> str:
    words = dict.fromkeys([*version.aliases, version.status])
    return ", ".join(word for word in words if word)


def main(arguments: list[str] | None = None) -> int:
    """Print the lineage that the command line asks for, or write it as a page."""
    parser = argparse.ArgumentParser(
        prog="python -m tasks.lineage", description="What a model came from, or which models saw a file.")
    parser.add_argument("model", nargs="?", help="MODEL, MODEL/VERSION or MODEL/ALIAS; MODEL alone is its champion")
    parser.add_argument("--file", help="which models saw it: a path, an s3:// URI, or a sha256")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--html", type=Path, help="write a page that needs nothing else")
    form.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if bool(options.model) == bool(options.file):
        parser.error("give a model, or --file")
    try:
        found: Iterable[Spec]
        if options.file:
            sha256 = content_hash(options.file)
            found = seen_by(sha256)
            shown: Any = lineage_page.Sightings(options.file, sha256, found)
        else:
            name, _, which = options.model.partition("/")
            found = ancestry(name, which or registry.CHAMPION)
            shown = lineage_page.Chain(found)
    except (RefusedError, FaultError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if options.html:
        store.write_atomic(options.html, shown.html())
    else:
        print(json.dumps([item.model_dump() for item in found], indent=1) if options.json else shown.text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
