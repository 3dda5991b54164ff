"""What `evaluate_model` checks and asks the engine for, without a scheduler."""

import json
from types import SimpleNamespace

import pytest
import yaml
from airflow.sdk.exceptions import AirflowFailException

from engine.errors import DataError, LayoutError, ModelError, RefusedError
from engine.spec import TrackingSpec
from tasks import evaluation, pipeline, runs
from tests.pipeline.airflow_stack import write_model
from tests.pipeline.examples import preset

JUDGED = {"rewards": [{"kind": "reward_model", "model": "trained"}], "max_response_tokens": 8}


def rlhf():
    """A preset whose evaluation scores with the reward model that its run trains."""
    base = preset(evaluate=JUDGED, reward_model={"optimizer": {"lr": 1e-3}, "iterations": 2, "rows_per_iteration": 4})
    pairs = {"sources": [{"kind": "reasoning_gym", "task": "chain_sum", "size": 8, "rejected": "no", "seed": 5}]}
    return base | {"prepare": base["prepare"] | {
        "preferences": pairs, "preferences_eval": pairs, "max_sequence_tokens": 48}}


@pytest.fixture
def model(tmp_path):
    write_model(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def prompts(tmp_path):
    def write(**sets):
        (tmp_path / "manifest.json").write_text(json.dumps({"sets": sets}))
        return str(tmp_path)

    return write


def test_prompts_are_known_by_the_hash_of_their_held_out_set(prompts):
    assert evaluation.check_prompts(prompts(train={"sha256": "t"}, eval={"sha256": "e"})) == "e"


def test_a_directory_without_held_out_prompts_is_refused(prompts, tmp_path):
    with pytest.raises(DataError, match="has no held-out set `eval`; it has train"):
        evaluation.check_prompts(prompts(train={"sha256": "t"}))
    with pytest.raises(DataError, match="manifest.json is not there; give the output directory of a `prepare` task"):
        evaluation.check_prompts(str(tmp_path / "nowhere"))


def test_a_path_is_a_directory_and_a_name_is_not_looked_for_on_the_disk(model):
    assert evaluation.find_model(model, "champion") == (model, None)
    assert evaluation.find_model("s3://bucket/model", "champion") == ("s3://bucket/model", None)
    with pytest.raises(ModelError, match="is not a directory; give a Hugging Face directory"):
        evaluation.find_model(f"{model}/nowhere", "champion")


def test_a_model_that_the_preset_cannot_divide_or_that_is_gone_is_refused(model):
    plan = pipeline.parse_pipeline(preset(evaluate=preset()["evaluate"] | {"layout": {"tp": 3}, "world_size": 3}))
    with pytest.raises(LayoutError, match="tp=3"):
        evaluation.check_model(plan, model)
    evaluation.check_model(pipeline.parse_pipeline(preset()), model)
    evaluation.check_model(plan, "s3://bucket/model")
    with pytest.raises(ModelError, match="is not there any more"):
        evaluation.check_model(plan, f"{model}/nowhere")


def test_a_directory_cannot_be_scored_by_the_reward_model_of_a_run(deployment, model, prompts, monkeypatch):
    (deployment.home / "rlhf.yaml").write_text(yaml.safe_dump(rlhf()))
    monkeypatch.setenv("RATCHET_PRESETS", str(deployment.home))
    params = {"preset": "rlhf", "model": model, "version": "", "prompts": prompts(eval={"sha256": "e"})}
    with pytest.raises(AirflowFailException, match="the reward model that a run trains, and .* is of no run"):
        evaluation.begin(params=params, ti=SimpleNamespace(dag_id="evaluate_model", run_id="r"))
    assert not evaluation.uses_trained_reward(pipeline.parse_pipeline(preset()))


def test_a_registered_version_is_scored_by_the_reward_model_of_its_own_run(deployment, model):
    root = runs.run_root("evaluate_model", "r")
    runs.write_run(root, runs.RunFile(
        pipeline=pipeline.parse_pipeline(rlhf()), preset="rlhf", base_model=model, base_version="tiny/3",
        tracking=TrackingSpec(experiment="e", run_id="run"), dag_id="evaluate_model", run_id="r"))
    begun = {"made_in": "/store/runs/other"}
    context = {"ti": SimpleNamespace(dag_id="evaluate_model", run_id="r", xcom_pull=lambda task_ids: begun),
               "params": {"prompts": " /prompts "}}
    spec = evaluation.job(context)
    assert spec.rewards[0].model == "/store/runs/other/reward_model/export"
    assert [(m.name, m.uri) for m in spec.models] == [("eval", model)] and spec.prompts == "/prompts"
    assert spec.cache == runs.evaluation_cache() and spec.tracking.run_id == "run"


def test_a_name_needs_a_registry(deployment, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(RefusedError, match="MLFLOW_TRACKING_URI is not set"):
        evaluation.find_model("tiny", "champion")
