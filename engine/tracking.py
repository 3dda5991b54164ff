"""Metrics of a stage: always to a file in the job directory, and from there to MLflow when it answers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.spec.tracking import TrackingSpec


@dataclass(frozen=True)
class DatasetInput:
    """A prompt set as an MLflow input of the run."""

    name: str
    digest: str
    """sha256 of the manifest; MLflow keeps 36 characters of it."""
    source: str
    """URI of the prepared set."""
    context: str = "training"
    """`training` or `evaluation`."""


class Tracker:
    """Writes what a stage reports; rank 0 only. Use as a context manager: leaving it sends what is left.

    No call waits for the network. Nothing is lost while the server is away: a thread sends from the files, in order, and
    keeps how far it came. A step that is in the file already (a resumed stage repeats it) is not written again.
    Without MLFLOW_TRACKING_URI or `spec.run_id` only the file is written.
    """

    def __init__(self, job_dir: Path, spec: TrackingSpec) -> None:
        raise NotImplementedError

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one iteration. Steps rise; a step already written is skipped."""
        raise NotImplementedError

    def log_params(self, params: Mapping[str, object]) -> None:
        """Parameters of the run."""
        raise NotImplementedError

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Tags of the run."""
        raise NotImplementedError

    def log_input(self, dataset: DatasetInput) -> None:
        """A prompt set the stage reads."""
        raise NotImplementedError

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """Upload a file (it must stay where it is until `close`)."""
        raise NotImplementedError

    def close(self, deadline_s: float = 30.0) -> bool:
        """Send what is left; False when the deadline passed first (the next Tracker of this directory goes on)."""
        raise NotImplementedError


def clean_metric_name(name: str) -> str:
    """A name that MLflow accepts; different names stay different.

    A name that is fine stays as it is. In another one each refused character becomes `_` and the end is a short hash of the
    original, so that `timing(s)` and `timing[s]` do not become one metric.
    """
    raise NotImplementedError
