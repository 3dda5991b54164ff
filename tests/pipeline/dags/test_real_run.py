"""The tiny preset end to end: real Airflow, real engine, real MLflow and registry."""

import json
from pathlib import Path

import pytest

from engine.spec import RunResult
from engine.store import hash_model_dir
from tasks import registry
from tasks.tracking import mlflow_client
from tests.engine.metric_names import undocumented
from tests.pipeline.conftest import REAL_ITERATIONS

pytestmark = pytest.mark.slow


@pytest.fixture
def client(airflow, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", airflow.stack.mlflow_url)
    with mlflow_client() as found:
        yield found


def result(airflow, task):
    return RunResult.model_validate_json((airflow.job("end-to-end", task) / "result.json").read_text())


def test_the_candidate_is_what_the_last_stage_exported_and_what_was_evaluated(airflow, real_run, client):
    made = airflow.api.xcom("train_ppo", "end-to-end", "register")
    version = registry.read("real", made["version"])
    assert made["stage"] == 2 and version.status in ("champion", "rejected")
    assert hash_model_dir(version.export_uri) == version.weights_hash
    assert result(airflow, "stage_2.train").hashes["weights"] == version.weights_hash
    assert result(airflow, "stage_2.evaluate").hashes["weights/stage_2"] == version.weights_hash


def test_stages_count_on_from_each_other(airflow, real_run):
    versions = [result(airflow, f"stage_{k}.train").policy_version for k in (1, 2)]
    assert versions == [REAL_ITERATIONS, 2 * REAL_ITERATIONS]


def test_the_review_generates_nothing_that_a_stage_has_generated(airflow, real_run):
    log = (airflow.job(real_run, "evaluate", "review_candidate") / "log.txt").read_text()
    events = [json.loads(line) for line in log.splitlines() if line.startswith('{"event": "evaluated"')]
    assert [(e["model"], e["cached"]) for e in events] == [("champion", True), ("candidate", True)]


def test_mlflow_has_a_parent_with_a_nested_run_per_stage_and_every_step_once(airflow, real_run, client):
    spec = json.loads((airflow.job("end-to-end", "stage_2.train") / "spec.json").read_text())
    parent = client.get_run(spec["tracking"]["parent_run_id"])
    children = client.search_runs(
        [parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    assert {c.data.tags["mlflow.runName"] for c in children} == {"stage_1", "stage_2"}
    assert {r.info.status for r in (parent, *children)} == {"FINISHED"}
    steps = sorted(m.step for child in children for m in client.get_metric_history(child.info.run_id, "reward/mean"))
    assert steps == list(range(1, 2 * REAL_ITERATIONS + 1))
    assert "report.html" in {Path(f.path).name for f in client.list_artifacts(parent.info.run_id, "report")}


def test_evaluating_a_model_of_the_run_generates_nothing_either_and_logs_it_once(airflow, real_run, client):
    made = airflow.api.xcom("train_ppo", "end-to-end", "register")
    prompts = json.loads((airflow.job("end-to-end", "stage_2.evaluate") / "spec.json").read_text())["prompts"]
    # Tests in between may have planned something else.
    airflow.plan({"real": ["/evaluate_model/"]})
    evaluation = airflow.api.trigger("evaluate_model", {
        "model": "real", "version": made["version"], "prompts": prompts, "preset": "real"})
    assert set(airflow.finished(evaluation, "evaluate_model").values()) == {"success"}
    log = (airflow.job(evaluation, "evaluate", "evaluate_model") / "log.txt").read_text()
    assert [json.loads(line)["cached"] for line in log.splitlines() if '"event": "evaluated"' in line] == [True]
    found = airflow.api.xcom("evaluate_model", evaluation, "result")
    stage = result(airflow, "stage_2.evaluate").metrics
    assert found["metrics"]["eval/mean_reward"] == stage["stage_2/mean_reward"]
    logged = client.get_metric_history(found["mlflow"].rpartition("/")[2], "eval/mean_reward")
    assert [metric.value for metric in logged] == [stage["stage_2/mean_reward"]]


def test_what_the_real_engine_logs_is_documented(airflow, real_run):
    for line in (airflow.job("end-to-end", "stage_1.train") / "metrics.jsonl").read_text().splitlines():
        assert undocumented(json.loads(line)["metrics"]) == []
