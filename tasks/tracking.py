"""MLflow runs of a pipeline: one parent per DAG run, one nested run per stage, the same ones on every retry."""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.spec.tracking import TrackingSpec


@dataclass(frozen=True)
class Lineage:
    """Where a run comes from; empty fields are not written."""

    git_sha: str = ""
    spec_hash: str = ""
    data_hash: str = ""
    base_model: str = ""
    """Registry version `name/3` or the URI of the base model."""
    airflow_dag_id: str = ""
    airflow_run_id: str = ""
    airflow_url: str = ""

    def tags(self) -> dict[str, str]:
        """MLflow tags, `ratchet.<field>`."""
        raise NotImplementedError


def parent_run(experiment: str, key: str, *, name: str, lineage: Lineage) -> TrackingSpec | None:
    """The run of one DAG run, made at the first call and found at every later one.

    Args:
        experiment: MLflow experiment, made when absent.
        key: identity of the DAG run, for example `train_ppo/manual__2026-11-29`; kept in the tag `ratchet.key`.
        name: shown in the UI.
    Returns:
        Its ids as `TrackingSpec(experiment, run_id=<parent>)`; None when MLFLOW_TRACKING_URI is not set.
    Raises:
        FaultError: the server does not answer.
    """
    raise NotImplementedError


def stage_run(parent: TrackingSpec | None, stage: str, *, lineage: Lineage) -> TrackingSpec:
    """The nested run of one stage, get-or-create; what the stage's spec gets as `tracking`."""
    raise NotImplementedError


def finish_run(tracking: TrackingSpec | None, *, status: str, metrics: Mapping[str, float] | None = None,
               tags: Mapping[str, str] | None = None) -> None:
    """End a run with `FINISHED`, `FAILED` or `KILLED`; idempotent."""
    raise NotImplementedError


def run_url(tracking: TrackingSpec | None) -> str:
    """The run's page in the MLflow UI; empty without a run."""
    raise NotImplementedError
