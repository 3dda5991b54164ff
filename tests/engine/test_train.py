"""The train stage as a job: `python -m engine train DIR`, on real Megatron and vLLM, one to two processes."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from engine import store
from tests.engine.metric_names import undocumented
from tests.engine.s3_server import s3_server
from tests.engine.test_evaluate import prepare_prompts
from tests.engine.tiny_models import make_reward_model, make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A model, and prompts for training."""
    root = tmp_path_factory.mktemp("train")
    make_tiny_model(root / "base")
    prepare_prompts(root, tokenizer=root / "base", train=24)
    return root


def write_job(world: Path, name: str, **fields) -> Path:
    """A job directory whose outputs stand beside its spec."""
    job = world / name
    job.mkdir()
    spec = {
        "stage": "train", "model": str(world / "base"), "prompts": str(world / "prompts"), "algorithm": {"kind": "ppo"},
        "rewards": [{"kind": "regex", "pattern": "(?s).{0,3}[a-m].*"}],
        "rollout": {"max_response_tokens": 8, "kv_cache_bytes": 16 << 20},
        "actor": {"lr": 1e-4}, "critic": {"lr": 1e-4}, "iterations": 3, "prompts_per_iteration": 8, "minibatches": 2,
        "microbatch_tokens": 96, "checkpoint_dir": str(job / "checkpoints"),
        "export_dir": str(job / "export"), **fields}
    (job / "spec.json").write_text(json.dumps(spec))
    return job


def start(job: Path) -> subprocess.Popen:
    with (job / "log.txt").open("a") as log:
        return subprocess.Popen([sys.executable, "-m", "engine", "train", str(job)], cwd=ROOT, stdout=log,
                                stderr=subprocess.STDOUT, start_new_session=True,
                                env=os.environ | {"OMP_NUM_THREADS": "1"})


def run(job: Path) -> dict:
    """Run a job to its end and return its result."""
    assert start(job).wait(timeout=600) == 0, (job / "log.txt").read_text()[-3000:]
    return json.loads((job / "result.json").read_text())


def metrics_of(job: Path) -> list[dict]:
    lines = [json.loads(line) for line in (job / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["metrics"] for line in lines]


def weights_of(export: str) -> dict:
    from safetensors.torch import load_file

    return load_file(Path(export) / "model.safetensors")


@pytest.fixture(scope="module")
def undisturbed(world) -> Path:
    """Three iterations in one process, never stopped."""
    job = write_job(world, "undisturbed", checkpoint_every=1)
    run(job)
    return job


def test_a_stage_trains_what_it_exports_and_samples_from_what_it_trained(world, undisturbed):
    from transformers import AutoModelForCausalLM

    result = json.loads((undisturbed / "result.json").read_text())
    before, after = weights_of(str(world / "base")), weights_of(result["outputs"]["export"])
    assert before.keys() == after.keys()
    assert all(not before[name].equal(after[name]) for name in before if "bias" not in name)
    AutoModelForCausalLM.from_pretrained(result["outputs"]["export"])
    assert undocumented(result["metrics"]) == []
    for row in metrics_of(undisturbed):
        assert undocumented(row) == [] and row["rollout/logprob_gap"] < 1e-4
        assert row["actor/skipped_steps"] == row["alarms/nan"] == 0
        names = ("generate", "score", "logprobs", "values", "update", "transition")
        phases = sum(row[f"time/{phase}_s"] for phase in names)
        assert phases + row["time/other_s"] == pytest.approx(row["time/iteration_s"])
    outbox = [json.loads(line) for line in (undisturbed / "tracking.jsonl").read_text().splitlines()]
    (params,) = [message["params"] for message in outbox if "params" in message]
    assert params["actor.lr"] == "0.0001" and params["algorithm.kind"] == "ppo" and params["rewards.0.kind"] == "regex"
    assert not [name for name in params if name.startswith("tracking")] and "resume_from" not in params
    # Weights travel once an iteration, before its only rollout.
    assert result["policy_version"] == 3
    kept = sorted(path.name for path in (undisturbed / "checkpoints").iterdir())
    assert kept == ["latest.json", "step-000002", "step-000003"]


def test_a_killed_stage_goes_on_and_ends_with_the_same_weights(world, undisturbed):
    job = write_job(world, "killed", checkpoint_every=1)
    process = start(job)
    deadline = time.monotonic() + 300
    while not (job / "checkpoints" / "step-000001").exists():
        assert process.poll() is None and time.monotonic() < deadline, (job / "log.txt").read_text()[-3000:]
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    run(job)
    assert '"resumed"' in (job / "log.txt").read_text()
    expected, found = weights_of(str(undisturbed / "export")), weights_of(str(job / "export"))
    assert all(expected[name].equal(found[name]) for name in expected)
    timeless = [{name: value for name, value in row.items() if not name.startswith("time/") and "_per_s" not in name}
                for row in (metrics_of(undisturbed)[-1], metrics_of(job)[-1])]
    assert timeless[0] == timeless[1]
    # Killed once more, between the last checkpoint and the result: the result is the same.
    first = json.loads((job / "result.json").read_text())
    (job / "result.json").unlink()
    shutil.rmtree(job / "export")
    again = run(job)
    assert again["hashes"] == first["hashes"] and again["policy_version"] == first["policy_version"]
    timeless = [{name: value for name, value in result["metrics"].items() if not name.startswith("memory/")}
                for result in (first, again)]
    assert timeless[0] == timeless[1] and "reward/mean" in timeless[1]


def test_a_stage_starts_where_the_stage_before_ended(world, undisturbed):
    """Two stages of one and two iterations are one stage of three."""
    first = write_job(world, "first", iterations=1)
    checkpoint = run(first)["outputs"]["checkpoint"]
    second = write_job(world, "second", iterations=2, resume_from=checkpoint)
    result = run(second)
    assert result["policy_version"] == 3
    expected, found = weights_of(str(undisturbed / "export")), weights_of(str(second / "export"))
    assert all(expected[name].equal(found[name]) for name in expected)


def test_a_reward_model_scores_what_is_generated(world):
    make_reward_model(world / "base", world / "reward_model")
    rewards = [{"kind": "regex", "pattern": "(?s).{0,3}[a-m].*"},
               {"kind": "reward_model", "model": str(world / "reward_model"), "weight": 0.5}]
    job = write_job(world, "reward-model", rewards=rewards, iterations=2, layout={"dp": 2})
    run(job)
    for row in metrics_of(job):
        assert row["reward/reward_model/mean"] != 0 and row["reward/errors"] == 0
        assert row["reward/mean"] == pytest.approx(row["reward/regex/mean"] + 0.5 * row["reward/reward_model/mean"])


@pytest.mark.parametrize(("layout", "generation"), [({"tp": 2}, 1), ({"pp": 2}, 2), ({"dp": 2}, 1)])
def test_two_ranks_learn_what_one_rank_learns(world, undisturbed, layout, generation):
    rollout = {"max_response_tokens": 8, "kv_cache_bytes": 16 << 20, "layout": {"tp": generation}}
    job = write_job(world, f"layout-{'-'.join(layout)}", layout=layout, rollout=rollout, iterations=2)
    run(job)
    if layout == {"dp": 2}:
        check_one_dead_rank(world, job)
    # Adam turns a gradient near zero into a step of full size, whatever its sign: rounding shows after one update.
    for expected, found, tolerance in zip(metrics_of(undisturbed), metrics_of(job), (1e-4, 2e-2), strict=False):
        assert found["rollout/logprob_gap"] < 1e-4
        for name in ("reward/mean", "rollout/response_tokens_mean", "actor/loss", "actor/grad_norm", "critic/loss",
                     "critic/grad_norm", "actor/entropy"):
            assert found[name] == pytest.approx(expected[name], rel=tolerance, abs=1e-5), name
    assert any(0 < row["reward/mean"] < 1 for row in metrics_of(job))


def check_one_dead_rank(world, undisturbed):
    """All ranks end with the one that died, none waits for it for ever, and together they go on (kubeflow #2000)."""
    spec = json.loads((undisturbed / "spec.json").read_text())
    job = write_job(world, "dead-rank", checkpoint_every=1, **{k: spec[k] for k in ("layout", "rollout", "iterations")})
    process = start(job)
    deadline = time.monotonic() + 300
    while not (job / "checkpoints" / "step-000001").exists():
        assert process.poll() is None and time.monotonic() < deadline, (job / "log.txt").read_text()[-3000:]
        time.sleep(0.01)
    ranks = ranks_of(job)
    assert sorted(ranks) == [0, 1]
    os.kill(ranks[1], signal.SIGKILL)
    assert process.wait(timeout=60) == 3
    assert not ranks_of(job)
    run(job)
    assert '"resumed"' in (job / "log.txt").read_text()
    expected, found = weights_of(str(undisturbed / "export")), weights_of(str(job / "export"))
    assert all(expected[name].equal(found[name]) for name in expected)


def ranks_of(job: Path) -> dict[int, int]:
    """Pids of a job's live ranks."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, KeyError):  # it has just ended; the parent of the ranks has no number
            if str(job) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found[int(process.environ()["RANK"])] = process.pid
    return found


@pytest.mark.parametrize(("layout", "generation"), [({}, 1), ({"pp": 2}, 2)])
def test_a_job_listens_on_this_machine_only(world, layout, generation):
    rollout = {"max_response_tokens": 8, "kv_cache_bytes": 16 << 20, "layout": {"tp": generation}}
    job = write_job(world, f"listens-{generation}", layout=layout, rollout=rollout, iterations=1)
    process = start(job)
    addresses = set()
    while process.poll() is None:
        with contextlib.suppress(psutil.Error):  # one has just ended
            for each in (psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)):
                addresses |= {socket.laddr.ip for socket in each.net_connections("inet") if socket.status == "LISTEN"}
        time.sleep(0.05)
    assert process.returncode == 0, (job / "log.txt").read_text()[-3000:]
    assert addresses == {"127.0.0.1"}


CANARIES = {"AWS_SESSION_TOKEN": "CANARYTOKEN", "OPENAI_API_KEY": "CANARYKEY", "MLFLOW_TRACKING_PASSWORD": "CANARYWORD",
            "RATCHET_JUDGE_KEY": "CANARYJUDGE", "HF_TOKEN": "CANARYHF"}


def test_stages_go_on_through_an_object_store_and_write_no_secret_anywhere(world, undisturbed, monkeypatch, tmp_path):
    """Two stages whose checkpoints and exports are in S3 are one stage on a disk."""
    for name, value in CANARIES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:CANARYPASSWORD@127.0.0.1:1")
    with s3_server(monkeypatch) as server:
        jobs = []
        resume: dict = {}
        for name, iterations in (("s3-first", 1), ("s3-second", 2)):
            jobs.append(write_job(
                world, name, checkpoint_dir=f"s3://bucket/{name}/checkpoints", export_dir=f"s3://bucket/{name}/export",
                iterations=iterations, keep_best={"metric": "reward/mean"}, **resume))
            result = run(jobs[-1])
            resume = {"resume_from": result["outputs"]["checkpoint"]}
        assert result["outputs"]["export"] == "s3://bucket/s3-second/export"
        assert store.exists(f"{result['outputs']['best_checkpoint']}/manifest.json")
        store.download_dir(result["outputs"]["export"], tmp_path / "export")
        objects = [store.read_bytes(f"s3://bucket/{name}") for name in store.list_files("s3://bucket")]
        assert server.requests
    expected, found = weights_of(str(undisturbed / "export")), weights_of(str(tmp_path / "export"))
    assert all(expected[name].equal(found[name]) for name in expected)
    written = [path.read_bytes() for job in jobs for path in job.rglob("*") if path.is_file()]
    assert len(written) > 20 and not [content for content in (*written, *objects) if b"CANARY" in content]


def test_checkpoints_of_another_spec_are_not_gone_on_from(world, undisturbed):
    other = write_job(world, "other", iterations=4, checkpoint_dir=str(undisturbed / "checkpoints"))
    assert start(other).wait(timeout=600) == 2
    said = (other / "log.txt").read_text().splitlines()[-1]
    assert "holds checkpoints of a job with another spec; choose another directory, or remove it" in said
