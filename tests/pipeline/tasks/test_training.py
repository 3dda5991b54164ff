"""What the tasks before RL are given: a spec, or the word that there is nothing to do."""

from types import SimpleNamespace

import pytest
from airflow.sdk.exceptions import AirflowSkipException

from engine.spec import RunResult, TrackingSpec
from tasks import pipeline, runs, training
from tests.pipeline.tasks.test_stages import PROMPTS, rlhf


@pytest.fixture
def context(monkeypatch):
    """A run whose pipeline fine-tunes but trains no reward model of its own."""
    changes = {"reward_model": None, "train": rlhf()["train"] | {"rewards": [{"kind": "exact"}]}}
    file = runs.RunFile(
        pipeline=pipeline.parse_pipeline(rlhf(**changes)), preset="p", base_model="/models/tiny", base_version="",
        tracking=TrackingSpec(run_id="parent"), dag_id="train_ppo", run_id="r", force=False)
    monkeypatch.setattr(training.runs, "read_run", lambda root: file)
    monkeypatch.setattr(training.runs, "run_root", lambda dag_id, run_id: "/store/runs/r")
    monkeypatch.setattr(training, "stage_run", lambda file, name: TrackingSpec(run_id=f"run of {name}"))
    prepared = RunResult(stage="prepare", **PROMPTS).model_dump()
    return {"ti": SimpleNamespace(
        dag_id="train_ppo", run_id="r", xcom_pull=lambda task_ids: {"prepare": prepared}.get(task_ids))}


def test_a_section_that_the_preset_has_becomes_a_job_with_a_tracking_run_of_its_own(context):
    spec = training.finetune_job(context, section="sft")
    assert (spec.stage, spec.prompts, spec.export_dir) == ("finetune", "/store/prompts", "/store/runs/r/sft/export")
    assert spec.tracking.run_id == "run of sft"


def test_a_section_that_the_preset_lacks_is_skipped(context):
    with pytest.raises(AirflowSkipException, match="preset p has no section reward_model"):
        training.finetune_job(context, section="reward_model")
