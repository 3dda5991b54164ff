"""The finetune stage on real Megatron: layouts, resuming, reward models in files, and jobs as processes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.errors import DataError, ModelError, SpecError
from engine.spec import load_spec, parse_spec
from tests.engine.finetuning import OBJECTIVES, finetune, make_world, metrics_of, write_finetune_job
from tests.engine.metric_names import undocumented
from tests.engine.multiprocess import shared_ranks
from tests.engine.tiny_models import classifier_scores

ROOT = Path(__file__).resolve().parents[2]
# Epsilon 1 makes a step a smooth function of the gradient: rounding stays rounding.
SMOOTH = {"lr": 0.05, "epsilon": 1.0}
KINDS = sorted(OBJECTIVES)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("finetune"), train=40)


@pytest.fixture(scope="module")
def alone(world):
    """Each kind in one process, in one microbatch."""
    jobs = {kind: write_finetune_job(world, f"alone-{kind}", kind, optimizer=SMOOTH) for kind in KINDS}
    for job in jobs.values():
        shared_ranks(1).run(finetune, job)
    return jobs


def weights_of(job: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(job / "export" / "model.safetensors")


def timeless(metrics: dict) -> dict:
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("layout", "budget"), [({}, 1), ({}, 60), ({"dp": 2}, 50), ({"tp": 2}, 10_000), ({"pp": 2}, 30)], ids=str)
def test_a_step_depends_neither_on_microbatches_nor_on_the_layout(world, alone, kind, layout, budget):
    """The held-out set has 13 rows: it does not divide by 2."""
    name = "-".join([kind, *layout, str(budget)])
    job = write_finetune_job(world, name, kind, optimizer=SMOOTH, layout=layout, microbatch_tokens=budget)
    results = shared_ranks(2 if layout else 1).run(finetune, job)
    assert all(result.metrics.keys() == results[0].metrics.keys() for result in results)
    expected, found = metrics_of(alone[kind]), metrics_of(job)
    assert len(found) == 4, "the held-out rows before, and three steps"
    for before, after in zip(expected, found, strict=True):
        assert timeless(after) == pytest.approx(timeless(before), rel=2e-4, abs=2e-5)
    for name, value in weights_of(alone[kind]).items():
        torch.testing.assert_close(weights_of(job)[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_loss_is_that_of_the_model_it_starts_from(alone, kind):
    first = metrics_of(alone[kind])[0]
    assert [undocumented(row) for row in metrics_of(alone[kind])] == [[]] * len(metrics_of(alone[kind]))
    if kind == "reward_model":
        # Its head starts at zero: every pair is a tie.
        assert first["eval/accuracy"] == 0.5
        assert first["eval/loss"] == pytest.approx(-torch.nn.functional.logsigmoid(torch.tensor(-0.2)).item(), rel=1e-5)
    elif kind == "dpo":
        assert first["eval/loss"] == pytest.approx(0.6931472, rel=1e-5)
    elif kind == "ipo":
        assert first["eval/loss"] == pytest.approx((1 / 0.4) ** 2, rel=1e-5)


def test_the_sft_loss_is_the_cross_entropy_of_transformers(world, alone):
    from transformers import AutoModelForCausalLM

    from engine.prompts import PromptSet

    model = AutoModelForCausalLM.from_pretrained(world / "base", dtype=torch.float32)
    losses, right = [], []
    for prompt in PromptSet.open(str(world / "prompts"), "sft_eval"):
        ids = torch.tensor([prompt.token_ids + prompt.responses[0]])
        with torch.no_grad():
            table = model(ids).logits[0, len(prompt.token_ids) - 1 : -1].log_softmax(-1)
        targets = ids[0, len(prompt.token_ids) :]
        losses += (-table.gather(1, targets[:, None]))[:, 0].tolist()
        right += table.argmax(-1).eq(targets).tolist()
    first = metrics_of(alone["sft"])[0]
    assert first["eval/loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert first["eval/accuracy"] == pytest.approx(sum(right) / len(right))


def test_a_reward_model_is_a_sequence_classifier_of_transformers(world, alone):
    """The files say what the trainer measured, by another implementation."""
    from engine.prompts import PromptSet

    pairs = PromptSet.open(str(world / "prompts"), "preferences_eval")
    scores = classifier_scores(alone["reward_model"] / "export", [
        [*prompt.token_ids, *response] for prompt in pairs for response in prompt.responses])
    result = load_result(alone["reward_model"])
    assert any(scores), "the head has been trained"
    assert result["eval/chosen_score"] == pytest.approx(sum(scores[::2]) / 13, rel=1e-4, abs=1e-6)
    assert result["eval/rejected_score"] == pytest.approx(sum(scores[1::2]) / 13, rel=1e-4, abs=1e-6)


def load_result(job: Path) -> dict:
    """Held-out metrics after the stage, from a repetition that has nothing left to train."""
    return shared_ranks(1).run(finetune, job)[0].metrics


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_a_policy_that_was_trained_is_another_model_of_the_same_architecture(world, alone, kind):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(alone[kind] / "export")
    before, after = load_file(world / "base" / "model.safetensors"), weights_of(alone[kind])
    assert before.keys() == after.keys()
    assert all(not before[name].equal(after[name]) for name in before if "bias" not in name)


@pytest.mark.parametrize("kind", ["reward_model", "dpo"])
def test_an_interrupted_stage_goes_on_and_ends_the_same(world, kind):
    job = write_finetune_job(world, f"interrupted-{kind}", kind, checkpoint_every=1)
    expected = shared_ranks(1).run(finetune, job)[0]
    rows, weights = metrics_of(job), weights_of(job)
    # As if killed between the last step and its checkpoint.
    shutil.rmtree(job / "checkpoints" / "step-000003")
    shutil.rmtree(job / "export")
    found = shared_ranks(1).run(finetune, job)[0]
    assert timeless(found.metrics) == timeless(expected.metrics), "the metrics before the first step survive too"
    assert metrics_of(job) == rows
    assert all(weights[name].equal(value) for name, value in weights_of(job).items())


def test_a_stage_starts_where_the_stage_before_ended(world):
    whole = write_finetune_job(world, "one-stage", "sft")
    expected = shared_ranks(1).run(finetune, whole)[0]
    first = write_finetune_job(world, "first-stage", "sft", iterations=2)
    before = shared_ranks(1).run(finetune, first)[0]
    second = write_finetune_job(world, "second-stage", "sft", iterations=1, resume_from=before.outputs["checkpoint"])
    found = shared_ranks(1).run(finetune, second)[0]
    assert found.policy_version == expected.policy_version == 3
    assert found.metrics["eval/loss_before"] == pytest.approx(before.metrics["eval/loss"])
    assert all(weights_of(whole)[name].equal(value) for name, value in weights_of(second).items())


def test_held_out_rows_are_measured_when_asked_for(world):
    job = write_finetune_job(world, "evaluate-every", "sft", evaluate_every=2, max_eval_rows=5)
    shared_ranks(1).run(finetune, job)
    assert ["eval/loss" in row for row in metrics_of(job)] == [True, False, True, False]


def test_what_cannot_work_is_refused(world, tmp_path):
    with pytest.raises(SpecError, match="rows_per_iteration 7 does not divide by layout.dp = 2"):
        load_spec(write_finetune_job(world, "odd", "sft", rows_per_iteration=7, layout={"dp": 2}))
    with pytest.raises(SpecError, match="objective"):
        parse_spec(json.loads((write_finetune_job(world, "kind", "sft") / "spec.json").read_text())
                   | {"objective": {"kind": "grpo"}})
    job = write_finetune_job(world, "few", "sft", max_eval_rows=1, layout={"dp": 2})
    with pytest.raises(DataError, match="fewer rows of sft_eval"):
        finetune(job)
    manifest = json.loads((world / "prompts" / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({"sets": {"train": manifest["sets"]["train"]}}))
    with pytest.raises(DataError, match="no split 'sft'"):
        finetune(write_finetune_job(world, "promptless", "sft", prompts=str(tmp_path)))


def test_a_model_without_a_score_is_no_reward_model(world):
    def load(directory):
        from engine.backends.megatron.parallel import start_world
        from engine.backends.megatron.trainer import load_network
        from engine.layout import ParallelLayout

        return load_network(directory, start_world(ParallelLayout()), "values", scored=True)

    with pytest.raises(ModelError, match="tensor score.weight with shape .* is missing"):
        load(world / "base")


@pytest.mark.slow
def test_a_job_runs_as_a_process_and_its_errors_are_one_line(world):
    job = write_finetune_job(world, "process", "reward_model", layout={"dp": 2})
    done = run_process(job)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((job / "result.json").read_text())
    assert result["stage"] == "finetune" and Path(result["outputs"]["export"]).is_dir()
    assert result["metrics"]["reward_model/skipped_steps"] == 0
    assert undocumented(result["metrics"]) == []
    assert {"eval/loss", "eval/accuracy", "eval/loss_before", "eval/accuracy_before"} <= result["metrics"].keys()
    refused = run_process(write_finetune_job(world, "refused", "sft", layout={"tp": 3}, rows_per_iteration=9))
    assert refused.returncode == 2
    assert "error: finetune: LayoutError: layout tp=3 does not divide 4 attention heads" in refused.stderr


def run_process(job: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "engine", "finetune", str(job)], cwd=ROOT, capture_output=True,
                          text=True, timeout=300, check=False)
