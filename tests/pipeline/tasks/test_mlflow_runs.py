"""Runs of a pipeline in a real MLflow server: one parent, one run per stage, the same on every retry."""

import json
import os
import subprocess
import sys

import pytest
from mlflow import MlflowClient

from engine.errors import FaultError, RefusedError
from engine.spec import TrackingSpec
from engine.spec.job import METRICS_FILE, OUTBOX_FILE
from tasks import tracking
from tasks.tracking import Lineage
from tests.mlflow_server import free_port

LINEAGE = Lineage(git_sha="abc", data_hash="def", airflow_url="http://airflow/run")


@pytest.fixture
def client(mlflow_uri):
    return MlflowClient(tracking_uri=mlflow_uri)


def test_a_retry_finds_the_runs_of_the_first_try(client):
    first = tracking.parent_run("retries", "train_ppo/run 1", name="run 1", lineage=LINEAGE)
    stage = tracking.stage_run(first, "stage_1", lineage=Lineage(spec_hash="s"))
    tracking.finish_run(stage, status="FAILED")
    assert tracking.parent_run("retries", "train_ppo/run 1", name="run 1", lineage=LINEAGE) == first
    assert tracking.stage_run(first, "stage_1", lineage=Lineage(spec_hash="s")) == stage
    assert client.get_run(stage.run_id).info.status == "RUNNING"
    assert tracking.stage_run(first, "stage_2", lineage=Lineage()).run_id != stage.run_id
    assert tracking.parent_run("retries", "train_ppo/run 2", name="run 2", lineage=LINEAGE) != first
    experiment = client.get_experiment_by_name("retries").experiment_id
    assert len(client.search_runs([experiment])) == 4


def test_stages_are_nested_and_lineage_is_in_the_tags(client):
    parent = tracking.parent_run("nested", "key", name="a run", lineage=LINEAGE)
    stage = tracking.stage_run(parent, "stage_1", lineage=Lineage(spec_hash="s"))
    assert stage == TrackingSpec(experiment="nested", run_id=stage.run_id, parent_run_id=parent.run_id)
    tags = client.get_run(stage.run_id).data.tags
    assert tags["mlflow.parentRunId"] == parent.run_id and tags["ratchet.spec_hash"] == "s"
    tags = client.get_run(parent.run_id).data.tags
    assert tags["ratchet.git_sha"] == "abc" and tags["ratchet.airflow_url"] == "http://airflow/run"
    assert "ratchet.spec_hash" not in tags


def test_finishing_twice_writes_the_metrics_once(client):
    parent = tracking.parent_run("finish", "key", name="a run", lineage=LINEAGE)
    for _ in range(2):
        tracking.finish_run(parent, status="FINISHED", metrics={"mean_reward": 0.5, "mean@1": 1.0})
    run = client.get_run(parent.run_id)
    assert run.info.status == "FINISHED"
    assert len(client.get_metric_history(parent.run_id, "mean_reward")) == 1
    assert len(run.data.metrics) == 2


def test_the_url_is_the_runs_page(client, mlflow_uri):
    parent = tracking.parent_run("files", "key", name="a run", lineage=LINEAGE)
    experiment = client.get_experiment_by_name("files").experiment_id
    assert tracking.run_url(parent) == f"{mlflow_uri}/#/experiments/{experiment}/runs/{parent.run_id}"


def test_what_an_ended_engine_could_not_send_is_sent_by_its_task_once(client, mlflow_uri, monkeypatch, tmp_path):
    parent = tracking.parent_run("late", "key", name="a run", lineage=LINEAGE)
    rows = [{"step": step, "time": 1e9 + step, "metrics": {"reward/mean": step / 10}} for step in range(3)]
    (tmp_path / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / OUTBOX_FILE).write_text('{"params": {"actor.lr": "1e-05"}}\n')
    monkeypatch.setattr(tracking, "SEND_LIMIT_S", 1.0)
    with monkeypatch.context() as away:
        away.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
        with pytest.raises(FaultError, match="has not taken all that .* measured"):
            tracking.send_left(tmp_path, parent)
    monkeypatch.setattr(tracking, "SEND_LIMIT_S", 30.0)
    for _ in range(2):
        tracking.send_left(tmp_path, parent)
    assert [(m.step, m.value) for m in client.get_metric_history(parent.run_id, "reward/mean")] == [
        (0, 0.0), (1, 0.1), (2, 0.2)]
    assert client.get_run(parent.run_id).data.params == {"actor.lr": "1e-05"}


def test_without_a_server_nothing_is_tracked_and_nothing_fails(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    parent = tracking.parent_run("none", "key", name="a run", lineage=LINEAGE)
    stage = tracking.stage_run(parent, "stage_1", lineage=LINEAGE)
    tracking.finish_run(stage, status="FINISHED")
    assert parent is None and stage == TrackingSpec() and tracking.run_url(stage) == ""


def test_a_server_that_does_not_answer_is_a_fault_and_its_password_is_not_shown(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:canary-secret@127.0.0.1:{free_port()}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(FaultError, match="MLflow at http://127.0.0.1") as caught:
        tracking.parent_run("any", "key", name="a run", lineage=LINEAGE)
    assert "canary" not in str(caught.value)


def test_a_deleted_experiment_is_refused_with_what_to_do(client):
    tracking.parent_run("deleted", "key", name="a run", lineage=LINEAGE)
    client.delete_experiment(client.get_experiment_by_name("deleted").experiment_id)
    with pytest.raises(RefusedError, match="'deleted' was deleted; restore it"):
        tracking.parent_run("deleted", "key", name="a run", lineage=LINEAGE)


def test_git_sha_is_the_commit_and_says_when_files_differ(tmp_path):
    assert tracking.git_sha(tmp_path) == ""
    environment = os.environ | {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a",
                                "GIT_COMMITTER_EMAIL": "a@b"}

    def git(*command):
        return subprocess.run(["git", "-C", str(tmp_path), *command], env=environment, check=True, capture_output=True,
                              text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-q", "-m", "first")
    commit = git("rev-parse", "HEAD")
    assert tracking.git_sha(tmp_path) == commit
    (tmp_path / "file").write_text("2")
    assert tracking.git_sha(tmp_path) == f"{commit}-dirty"


def test_importing_the_modules_loads_no_mlflow():
    code = "import sys, tasks.tracking, tasks.registry, tasks.gates; print({'mlflow', 'torch'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
