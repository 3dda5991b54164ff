"""What the tasks before RL are given: a spec, or the word that there is nothing to do."""

from types import SimpleNamespace

import pytest
from airflow.sdk.exceptions import AirflowSkipException

from engine.errors import SpecError
from engine.spec import RunResult, TrackingSpec
from tasks import deployment, links, pipeline, runs, training
from tests.pipeline.tasks.test_stages import PROMPTS, rlhf


@pytest.fixture
def context(monkeypatch):
    """A run whose pipeline fine-tunes but trains no reward model of its own."""
    changes = {"reward_model": None, "train": rlhf()["train"] | {"rewards": [{"kind": "exact"}]}}
    file = runs.RunFile(
        pipeline=pipeline.parse_pipeline(rlhf(**changes)), preset="p", base_model="/models/tiny", base_version="",
        tracking=TrackingSpec(run_id="parent"), mlflow_url="http://mlflow/#/experiments/1/runs/parent",
        gpu_hour_price=2.5, dag_id="train_ppo", run_id="r", force=False)
    monkeypatch.setattr(training.runs, "read_run", lambda root: file)
    monkeypatch.setattr(training.runs, "run_root", lambda dag_id, run_id: "/store/runs/r")
    monkeypatch.setattr(training, "stage_run", lambda file, name: TrackingSpec(run_id=f"run of {name}"))
    prepared = RunResult(stage="prepare", **PROMPTS).model_dump()
    pushed = {}
    ti = SimpleNamespace(
        dag_id="train_ppo", run_id="r", task_id="sft", pushed=pushed,
        xcom_push=lambda key, value: pushed.update({key: value}),
        xcom_pull=lambda task_ids: {"prepare": prepared}.get(task_ids))
    return {"ti": ti, "task": SimpleNamespace()}


def test_a_section_that_the_preset_has_becomes_a_job_with_a_tracking_run_of_its_own(context):
    spec = training.finetune_job(context, section="sft")
    assert (spec.stage, spec.prompts, spec.export_dir) == ("finetune", "/store/prompts", "/store/runs/r/sft/export")
    assert spec.tracking.run_id == "run of sft"
    shown = context["ti"].pushed
    assert shown["link_mlflow"] == "http://mlflow/#/experiments/1/runs/run of sft"
    assert shown["link_report"].endswith("/ratchet/runs/train_ppo/r/report")
    # What Airflow asks for when the task ends is what was shown while it ran.
    assert {link.xcom_key: link.get_link(context["task"], ti_key=None) for link in links.LINKS} == {
        **shown, "link_log": ""}


def test_a_section_that_the_preset_lacks_is_skipped(context):
    with pytest.raises(AirflowSkipException, match="preset p has no section reward_model"):
        training.finetune_job(context, section="reward_model")


def test_the_result_in_words_names_the_candidate_the_change_and_where_to_read_on(context):
    file = training.run_file(context)
    note = training.result_note(file, "tiny/3", 2, {0: {"mean_reward": 0.125}, 2: {"mean_reward": 0.5}})
    assert note.startswith("candidate **tiny/3** from stage 2: mean_reward 0.125 → 0.5 on held-out prompts.")
    assert f"[MLflow]({file.mlflow_url})" in note and "/ratchet/runs/train_ppo/r/report)" in note
    assert "→" not in training.result_note(file, "tiny/3", 2, {0: {}, 2: {"mean_reward": 0.5}})


@pytest.mark.parametrize(("value", "price"), [("", None), ("2.5", 2.5), ("0", 0.0)])
def test_the_price_of_a_gpu_is_the_deployments(monkeypatch, value, price):
    monkeypatch.setenv("RATCHET_GPU_HOUR_PRICE", value)
    assert deployment.gpu_hour_price() == price


@pytest.mark.parametrize("value", ["cheap", "-1", "nan", "inf"])
def test_what_is_no_price_is_refused(monkeypatch, value):
    monkeypatch.setenv("RATCHET_GPU_HOUR_PRICE", value)
    with pytest.raises(SpecError, match="RATCHET_GPU_HOUR_PRICE=.*is not a price"):
        deployment.gpu_hour_price()


def test_a_browser_gets_the_address_of_mlflow_that_it_can_reach_and_no_password(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@mlflow:5000/")
    monkeypatch.delenv("RATCHET_MLFLOW_URL", raising=False)
    assert deployment.mlflow_url() == "http://mlflow:5000"
    monkeypatch.setenv("RATCHET_MLFLOW_URL", "https://mlflow.example/ui/")
    assert deployment.mlflow_url() == "https://mlflow.example/ui"
