"""MLflow runs of a pipeline: one parent per DAG run, one nested run per stage, the same ones on every retry."""

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from engine.errors import FaultError, RefusedError
from engine.mlflow_sender import Sender, unsent_bytes
from engine.spec.tracking import TrackingSpec, clean_metric_name
from engine.store import hash_dir
from tasks import deployment

KEY_TAG = "ratchet.key"
"""Identity of a run: whoever asks with the same key gets the same run."""

SEND_LIMIT_S = 60.0
TAGS_AT_ONCE = 100
"""MLflow takes no more in one request."""


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
        return {f"ratchet.{name}": value for name, value in asdict(self).items() if value}


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
        RefusedError: the experiment was deleted in MLflow.
    """
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        return None
    with mlflow_client() as client:
        run_id = _get_or_create(client, _experiment_id(client, experiment), key, {"mlflow.runName": name}, lineage)
    return TrackingSpec(experiment=experiment, run_id=run_id)


def stage_run(parent: TrackingSpec | None, stage: str, *, lineage: Lineage) -> TrackingSpec:
    """The nested run of one stage, get-or-create; what the stage's spec gets as `tracking`.

    Raises:
        FaultError: the server does not answer.
    """
    if parent is None or parent.run_id is None or parent.experiment is None:
        return TrackingSpec()
    with mlflow_client() as client:
        run_id = _get_or_create(
            client, _experiment_id(client, parent.experiment), f"{parent.run_id}/{stage}",
            {"mlflow.runName": stage, "mlflow.parentRunId": parent.run_id, "ratchet.stage": stage}, lineage)
    return TrackingSpec(experiment=parent.experiment, run_id=run_id, parent_run_id=parent.run_id)


def finish_run(tracking: TrackingSpec | None, *, status: str, metrics: Mapping[str, float] | None = None) -> None:
    """End a run with `FINISHED`, `FAILED` or `KILLED`; idempotent.

    Args:
        metrics: written at step 0 with names that MLflow accepts; once, also when called again.
    """
    if tracking is None or tracking.run_id is None:
        return
    from mlflow.entities import Metric

    with mlflow_client() as client:
        run = client.get_run(tracking.run_id)
        # The run's own start as the time: the same numbers written again are then the same rows.
        values = [Metric(clean_metric_name(name), value, run.info.start_time, 0)
                  for name, value in (metrics or {}).items()]
        client.log_batch(tracking.run_id, metrics=values)
        if run.info.status != status:
            client.set_terminated(tracking.run_id, status)


def send_left(job: Path, tracking: TrackingSpec | None) -> None:
    """Send what a job that has ended measured while MLflow was away; nothing when MLflow has it all.

    Raises:
        FaultError: MLflow is still away; what is left stays in the job directory.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not uri or tracking is None or tracking.run_id is None or not unsent_bytes(job):
        return
    if not Sender(job, uri, tracking.run_id).finish(SEND_LIMIT_S):
        raise FaultError(f"MLflow at {_public_uri()} has not taken all that {job} measured; is it up?")


def log_text(tracking: TrackingSpec | None, text: str, name: str) -> None:
    """Write a text file among the run's artifacts."""
    if tracking is None or tracking.run_id is None:
        return
    with mlflow_client() as client:
        client.log_text(tracking.run_id, text, name)


def read_text(run_id: str, name: str) -> str | None:
    """A text file of a run's artifacts; None when it has no such file."""
    folder = name.rpartition("/")[0]
    with mlflow_client() as client, tempfile.TemporaryDirectory() as directory:
        if name not in [file.path for file in client.list_artifacts(run_id, folder)]:
            return None
        return Path(client.download_artifacts(run_id, name, directory)).read_text()


def set_tags(tracking: TrackingSpec | None, tags: Mapping[str, str]) -> None:
    """Set tags of a run, whatever its status."""
    if tracking is None or tracking.run_id is None:
        return
    from mlflow.entities import RunTag

    run_tags = [RunTag(key, text) for key, text in tags.items()]
    with mlflow_client() as client:
        for start in range(0, len(run_tags), TAGS_AT_ONCE):
            client.log_batch(tracking.run_id, tags=run_tags[start : start + TAGS_AT_ONCE])


def run_url(tracking: TrackingSpec | None) -> str:
    """The run's page in the MLflow UI, as a browser reaches it; empty without a run."""
    if tracking is None or tracking.run_id is None:
        return ""
    with mlflow_client() as client:
        experiment_id = client.get_run(tracking.run_id).info.experiment_id
    return f"{deployment.mlflow_url()}/#/experiments/{experiment_id}/runs/{tracking.run_id}"


def review_links(tracking: TrackingSpec | None, model: str, version: str) -> dict[str, str]:
    """Pages of MLflow that a reviewer wants, by what they are called."""
    page = f"{deployment.mlflow_url()}/#/models/{quote(model)}/versions/{version}"
    links = {f"{model} version {version} in MLflow": page}
    if run := run_url(tracking):
        links |= {"Training run in MLflow": run, "Report": f"{run}/artifacts/report/report.html"}
    return links


def version_uri(model: str, version: str) -> str:
    """A name for a registered version that is its own on every server: `http://server/models/name/3`."""
    return f"{_public_uri()}/models/{model}/{version}"


def git_sha(checkout: Path = Path(__file__).parents[1]) -> str:
    """The commit of a checkout, with `-dirty` when tracked files differ; empty outside a repository."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def source_hash(checkout: Path = Path(__file__).parents[1]) -> str:
    """sha256 over the Python files of the pipeline and the engine: what ran, also where there is no commit."""
    names = [path.relative_to(checkout).as_posix() for part in ("dags", "engine", "tasks")
             for path in (checkout / part).rglob("*.py")]
    return hash_dir(checkout, names)


@contextmanager
def mlflow_client() -> Iterator[Any]:
    """A client of the server at MLFLOW_TRACKING_URI; its failures become this project's errors.

    Raises:
        RefusedError: no server is configured, or it refused the request for good.
        FaultError: it does not answer or failed.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        raise RefusedError("MLFLOW_TRACKING_URI is not set; give the address of the MLflow server")
    # A task is retried by Airflow; the client's own 7 retries would hold it for minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    try:
        yield MlflowClient(tracking_uri=uri, registry_uri=uri)
    except MlflowException as error:
        if error.error_code in ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "PERMISSION_DENIED",
                                "UNAUTHENTICATED"):
            raise RefusedError(f"MLflow at {_public_uri()} refused: {error.message:.300}") from None
        # Not the message: it may hold the address with a password.
        raise FaultError(f"MLflow at {_public_uri()} failed ({error.error_code}); is it up?") from None
    except OSError as error:
        raise FaultError(f"MLflow at {_public_uri()} does not answer ({type(error).__name__}); is it up?") from None


def _public_uri() -> str:
    """The server's address as it may be shown."""
    return deployment.public_address(os.environ["MLFLOW_TRACKING_URI"])


def _experiment_id(client: Any, name: str) -> str:
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return client.create_experiment(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            experiment = client.get_experiment_by_name(name)  # another task made it in between
    if experiment.lifecycle_stage != "active":
        raise RefusedError(f"MLflow experiment {name!r} was deleted; restore it in MLflow or choose another name")
    return experiment.experiment_id


def _get_or_create(client: Any, experiment_id: str, key: str, tags: dict[str, str], lineage: Lineage) -> str:
    if "'" in key:
        raise RefusedError(f"run key {key!r} has a quote; MLflow cannot search for it")
    # The oldest: should two tasks ever have made one each, everybody still agrees.
    found = client.search_runs([experiment_id], f"tags.`{KEY_TAG}` = '{key}'", max_results=1,
                               order_by=["attributes.start_time ASC", "attributes.run_id ASC"])
    if not found:
        run = client.create_run(experiment_id, tags={**tags, **lineage.tags(), KEY_TAG: key})
        return run.info.run_id
    run_id = found[0].info.run_id
    for tag, value in lineage.tags().items():
        if found[0].data.tags.get(tag) != value:
            client.set_tag(run_id, tag, value)
    if found[0].info.status != "RUNNING":
        client.update_run(run_id, status="RUNNING")
    return run_id
