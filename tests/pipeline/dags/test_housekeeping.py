"""DAG `housekeeping` under the real scheduler: what a run that has not ended trains from is kept, the rest goes."""

import os
import time
from pathlib import Path

import pytest

from engine import store
from tests.pipeline.airflow_stack import write_model

pytestmark = pytest.mark.slow
DAYS_AGO = 40


def old_run(airflow, name):
    """Files of a run of another DAG, 40 days old; its export."""
    root = airflow.home / "store" / "runs" / "old_dag" / name
    write_model(root / "stage_1" / "export")
    store.write_bytes(root / "stage_1" / "checkpoints" / "step-000004" / "manifest.json", "{}")
    job = airflow.job(name, "stage_1.train", "old_dag")
    store.write_bytes(job / "result.json", '{"stage": "train", "gpu_seconds": 7200.0}')
    store.write_bytes(job / "spec.json", "{}")
    written = time.time() - DAYS_AGO * 86400
    for path in (*root.rglob("*"), *job.rglob("*")):
        os.utime(path, (written, written))
    return root / "stage_1" / "export"


def test_a_run_that_has_not_ended_keeps_its_model_and_a_dry_run_keeps_all(airflow):
    base, newest = old_run(airflow, "one"), old_run(airflow, "two")
    os.utime(newest / "config.json")
    airflow.plan({"housekept/stage_1.train": [{"seconds": 600}]})
    training = airflow.api.trigger("train_ppo", {"preset": "tiny", "stages": 1, "model": str(base)}, "housekept")
    airflow.wait((airflow.job(training, "stage_1.train") / "started").exists)

    form = {"keep_runs": 1, "keep_days": 30, "what": ["jobs", "checkpoints", "exports"]}
    dry = airflow.api.trigger("housekeeping", form, "dry")
    assert airflow.finished(dry, "housekeeping") == {"look": "success", "delete": "skipped"}
    assert airflow.api.xcom("housekeeping", dry, "look")["to_delete"] == 2
    report = Path(airflow.api.xcom("housekeeping", dry, "look")["report"]).read_text()
    assert str(base.with_name("checkpoints")) in report and "train_ppo/housekept has not ended" in report
    assert "| old_dag/one |" in report and "| 2.00 |" in report
    assert len(airflow.api.xcom("housekeeping", dry, "look", "table")) < 8192
    assert base.with_name("checkpoints").exists()

    real = airflow.api.trigger("housekeeping", {**form, "dry_run": False}, "real")
    assert airflow.finished(real, "housekeeping") == {"look": "success", "delete": "success"}
    assert airflow.api.xcom("housekeeping", real, "delete")["deleted"] == 2
    assert base.exists() and not base.with_name("checkpoints").exists()
    assert newest.exists() and newest.with_name("checkpoints").exists()
    assert not airflow.job("one", "stage_1.train", "old_dag").exists()

    airflow.api.set_state("train_ppo", training, "stage_1.train", "failed")
    airflow.finished(training)
    last = airflow.api.trigger("housekeeping", {**form, "dry_run": False}, "last")
    airflow.finished(last, "housekeeping")
    assert not base.exists() and newest.exists()
