"""The file that a pipeline run is: its first task writes it, all others and the review of its candidate read it."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from engine.errors import MissingError, SpecError
from engine.spec import TrackingSpec
from engine.spec.base import URI, Spec
from engine.store import join, read_text, write_bytes
from tasks import deployment
from tasks.jobs import safe_name
from tasks.pipeline import Pipeline

RUN_FILE = "run.json"
CANDIDATE_FILE = "candidate.json"
REVIEW_FILE = "review.json"


class RunFile(Spec):
    """What was decided when the run started; later changes of a preset do not reach a run that has begun."""

    pipeline: Pipeline
    preset: str
    base_model: URI
    """URI of the model that training starts from."""
    base_version: str = ""
    """Registry version of the base model when it is the champion; empty otherwise."""
    tracking: TrackingSpec
    """The parent run."""
    mlflow_url: str = ""
    """Its page, as a browser reaches it."""
    gpu_hour_price: float | None = None
    """What this deployment paid for a GPU when the run began; None: costs are not shown."""
    dag_id: str
    run_id: str
    force: bool = False
    """Replace jobs of this run that hold another spec."""


def run_root(dag_id: str, run_id: str) -> str:
    """Where a run keeps its files: the same directory for every try of every task of one DAG run."""
    return join(deployment.store(), "runs", safe_name(dag_id), safe_name(run_id))


def evaluation_cache() -> str:
    """The cache of evaluations that all runs of this deployment share."""
    return join(deployment.store(), "evaluations")


def write_run(root: str, run: RunFile) -> None:
    """Write a run's file."""
    write_bytes(join(root, RUN_FILE), run.model_dump_json(indent=1))


def read_run(root: str) -> RunFile:
    """Read a run's file.

    Raises:
        StoreError: it is not there or cannot be read. SpecError: it does not fit this version's schema.
    """
    where = join(root, RUN_FILE)
    try:
        return RunFile.model_validate_json(read_text(where))
    except ValidationError as error:
        fields = ", ".join(".".join(map(str, item["loc"])) for item in error.errors())
        raise SpecError(f"{where}: from another version of Ratchet, {fields} do not fit; start a new run") from None


class CandidateFile(Spec):
    """What a run made: written when its candidate is registered, read by the review."""

    model: str
    """Name of the registered model."""
    version: str
    stage: int
    """Stage whose export it is."""
    export_uri: URI
    weights_hash: str
    prompts: URI
    """Prepared prompts: the review evaluates on their `eval/`."""
    training: dict[str, float] = {}
    """Metrics of its last training job, for the limits of the gate."""


def write_candidate(root: str, candidate: CandidateFile) -> None:
    """Write what a run made."""
    write_bytes(join(root, CANDIDATE_FILE), candidate.model_dump_json(indent=1))


def read_candidate(root: str) -> CandidateFile:
    """Read what a run made.

    Raises:
        StoreError: the run registered no candidate, or its files are gone.
    """
    return CandidateFile.model_validate_json(read_text(join(root, CANDIDATE_FILE)))


def write_review(root: str, verdict: Mapping[str, Any]) -> None:
    """Write what the gate said of the run's candidate: `GateResult.to_dict()` and the version."""
    write_bytes(join(root, REVIEW_FILE), json.dumps(verdict, indent=1))


def read_review(root: str) -> dict[str, Any] | None:
    """What the gate said of the run's candidate; None before its review."""
    try:
        return json.loads(read_text(join(root, REVIEW_FILE)))
    except MissingError:
        return None
