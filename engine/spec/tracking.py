"""Where a stage's metrics go in MLflow. The server's address is deployment: MLFLOW_TRACKING_URI."""

import hashlib
import re
from collections.abc import Set
from typing import Any

from engine.spec.base import Spec

MAX_NAME_LENGTH = 250
"""MLflow refuses longer names of metrics, parameters and tags."""


class TrackingSpec(Spec):
    """Names of the MLflow run that a stage writes to; both ids None: metrics stay in the job directory."""

    experiment: str | None = None
    """MLflow experiment name."""
    run_id: str | None = None
    """The stage's own (nested) run, made by the task so that a retry has the same one."""
    parent_run_id: str | None = None
    """The DAG run's run."""

def clean_metric_name(name: str) -> str:
    """A name that MLflow accepts; different names stay different.

    A name that is fine stays as it is. In another one each refused character becomes `_` and the end is a short hash of
    the original, so that `timing(s)` and `timing[s]` do not become one metric.
    """
    cleaned = re.sub(r"[^A-Za-z0-9_\-./ :]", "_", name)
    # MLflow treats names as paths: no empty, `.` or `..` parts, nothing absolute.
    parts = [part for part in cleaned.split("/") if part not in ("", ".", "..")]
    cleaned = "/".join(parts)
    if cleaned == name and 0 < len(name) <= MAX_NAME_LENGTH:
        return name
    return f"{cleaned[: MAX_NAME_LENGTH - 13]}.{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:12]}"


def parameters(spec: Spec, without: Set[str] = frozenset()) -> dict[str, Any]:
    """The numbers and texts of a spec by dotted name: `actor.lr`, `rewards.0.kind`; what is None is left out.

    Args: without: fields of the spec to leave out.
    """
    found: dict[str, Any] = {}

    def collect(name: str, value: Any) -> None:
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
        if inner is None:
            found[name] = value
        for key, part in inner or ():
            collect(f"{name}.{key}" if name else str(key), part)

    collect("", spec.model_dump(mode="json", exclude=set(without), exclude_none=True))
    return found
