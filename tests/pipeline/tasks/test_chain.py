"""The preset `rlhf` by the real engine, job after job: what the DAG runs, without Airflow."""

import os
import subprocess
from pathlib import Path

import pytest

from engine.spec import RunResult, TrackingSpec, dump_spec
from tasks import pipeline, stages

pytestmark = pytest.mark.slow
ENGINE = str(Path(".venv/engine/bin/python").absolute())


def run_job(directory: Path, spec) -> RunResult:
    """What `EngineOperator` does, in a few lines."""
    directory.mkdir(parents=True)
    (directory / "spec.json").write_text(dump_spec(spec))
    done = subprocess.run([ENGINE, "-m", "engine", spec.stage, str(directory)], capture_output=True, text=True,
                          timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    return RunResult.model_validate_json((directory / "result.json").read_text())


def test_sft_then_a_reward_model_then_ppo_on_its_scores_raise_a_reward_that_none_of_them_saw(tmp_path):
    model = tmp_path / "models" / "tiny"
    subprocess.run([ENGINE, "examples/models.py", "tiny", str(model)], check=True, capture_output=True)
    plan = pipeline.parse_pipeline(pipeline.read_preset(Path("examples"), "rlhf"))
    results: dict[str, RunResult] = {}
    run = stages.Run(pipeline=plan, root=str(tmp_path / "run"), evaluations=str(tmp_path / "evaluations"),
                     base_model=str(model), results=results, tracking=TrackingSpec())
    (tmp_path / "run").mkdir()
    results["prepare"] = run_job(tmp_path / "prepare", stages.prepare_spec(run))
    for section in plan.finetuned:
        results[section] = run_job(tmp_path / section, stages.finetune_spec(run, section))
    assert results["sft"].metrics["eval/loss"] < 0.6 * results["sft"].metrics["eval/loss_before"]
    assert results["reward_model"].metrics["eval/accuracy"] >= 0.95
    results["stage_1.train"] = run_job(tmp_path / "train", stages.train_spec(run, 1))
    evaluated = run_job(tmp_path / "evaluate", stages.comparison_spec(run, {
        "base": str(model), "sft": results["sft"].outputs["export"],
        "stage_1": results["stage_1.train"].outputs["export"]}, prompts=results["prepare"].outputs["prompts"]))
    scores = [evaluated.metrics[f"{name}/mean_reward"] for name in ("base", "sft", "stage_1")]
    assert scores[0] + 0.05 < scores[1] < scores[2], scores
