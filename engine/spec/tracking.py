"""Where a stage's metrics go in MLflow. The server's address is deployment: MLFLOW_TRACKING_URI."""

from engine.spec.base import Spec


class TrackingSpec(Spec):
    """Names of the MLflow run that a stage writes to; both ids None: metrics stay in the job directory."""

    experiment: str | None = None
    """MLflow experiment name."""
    run_id: str | None = None
    """The stage's own (nested) run, made by the task so that a retry has the same one."""
    parent_run_id: str | None = None
    """The DAG run's run."""
    tags: dict[str, str] = {}
    """Lineage: Airflow URLs, spec hash, git sha."""
