"""The contract across the process boundary: what a job directory holds and what a stage returns."""

import hashlib
import json
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from engine.errors import SpecError
from engine.spec.base import Spec
from engine.spec.evaluate import EvaluateSpec
from engine.spec.finetune import FinetuneSpec
from engine.spec.prepare import PrepareSpec
from engine.spec.report import ReportSpec
from engine.spec.train import TrainSpec

RunSpec = Annotated[PrepareSpec | FinetuneSpec | TrainSpec | EvaluateSpec | ReportSpec, Field(discriminator="stage")]
_ADAPTER: TypeAdapter = TypeAdapter(RunSpec)

SPEC_FILE = "spec.json"
SPEC_HASH_FILE = "spec.sha256"
JOB_FILE = "job.json"
HEARTBEAT_FILE = "heartbeat"
LOG_FILE = "log.txt"
PROGRESS_FILE = "progress.json"
EXIT_FILE = "exit.json"
RESULT_FILE = "result.json"
METRICS_FILE = "metrics.jsonl"
OUTBOX_FILE = "tracking.jsonl"
"""For MLflow: parameters, tags, inputs and artifacts, in the order they were given."""
SENT_FILE = "tracking.sent.json"
"""How many bytes of METRICS_FILE and OUTBOX_FILE MLflow has."""
ATTEMPT_FILE = "attempt"
"""Number of the attempt that may write; locked (flock) while it changes and while something is committed."""
FOLLOWED_FILE = "followed"
"""Touched by the task that follows the job, as long as one does."""
ATTEMPT_VARIABLE = "RATCHET_ATTEMPT"
"""Environment variable by which an engine knows its own attempt."""


class RunResult(Spec):
    """What a stage wrote, as small numbers and URIs (it travels through XCom)."""

    stage: str
    outputs: dict[str, str] = {}
    """Named URIs. prepare: `prompts`; finetune and train: `checkpoint`, `export`; evaluate: `evaluation`, `samples`;
    report: `report`."""
    metrics: dict[str, float] = {}
    """evaluate calls them `<model>/<metric>`, for example `base/mean_reward` and `stage_1/mean_reward`."""
    hashes: dict[str, str] = {}
    """sha256 by name: `weights`, `prompts`, `spec`."""
    policy_version: int = 0
    gpu_seconds: float = 0.0
    """Wall seconds times ranks."""
    timings_s: dict[str, float] = {}


def parse_spec(data: dict[str, Any]) -> RunSpec:
    """Check `data` against the schema.

    Raises:
        SpecError: one line with each wrong field, its value, and what it must be.
    """
    try:
        return _ADAPTER.validate_python(data)
    except ValidationError as error:
        raise SpecError("; ".join(_describe(item) for item in error.errors())) from None


def _describe(item: Any) -> str:
    # The first part of a location is the union member; the user wrote no such key.
    where = ".".join(str(part) for part in item["loc"][1:]) or "spec"
    return f"{where}: {item['msg']}{shown(item.get('input'))}"


def shown(value: Any) -> str:
    """A wrong value as errors show it: shortened, no sections, no user and password of an address."""
    return "" if isinstance(value, dict) else f" (got {re.sub('//[^/@ ]*@', '//...@', str(value))[:80]!r})"


def dump_spec(spec: Spec) -> str:
    """The canonical text of a spec: sorted keys, so that equal specs have equal hashes."""
    return json.dumps(spec.model_dump(mode="json"), sort_keys=True, indent=1) + "\n"


def hash_spec(spec: Spec) -> str:
    """sha256 of `dump_spec(spec)`, hexadecimal."""
    return hashlib.sha256(dump_spec(spec).encode()).hexdigest()


def load_spec(job_dir: Path) -> RunSpec:
    """Read the spec of a job directory.

    Raises:
        SpecError: no such file, not JSON, or against the schema.
    """
    path = job_dir / SPEC_FILE
    try:
        return parse_spec(json.loads(path.read_text()))
    except (OSError, json.JSONDecodeError) as error:
        raise SpecError(f"{path}: {error}") from None
