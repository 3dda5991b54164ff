"""What the pipeline costs around the engine, and how often it promotes a model that is no better.

- `task_gap_s`: from the end of one engine job to the start of the next task's, through Airflow's scheduler, a fresh
  task process, MLflow and the job directory. Real stack, the tests' stand-in for the engine; median over two runs.
- `report_s`: `python -m engine report` on 10,000 iterations of two stages with an evaluation; the whole process.
- `mlflow_ms_per_iteration`: time that the training loop spends in the tracker, beside a real server: the median call,
  and an iteration's part of the end. Most of it is the disk's sync of the metrics file, which is printed by itself.
- `false_promotion_rate`: share of 2,000 comparisons of a model with itself (new samples each time) that the gate
  passes.

Runs in the pipeline's environment; what needs the engine's runs in a process of that one. `--only NAME` measures one.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
ENGINE = ROOT / ".venv" / "engine" / "bin" / "python"
METRICS = [f"{group}/metric_{k}" for group in ("actor", "critic", "rollout", "reward", "time") for k in range(10)]
REPORT_ITERATIONS, TRACKED_ITERATIONS, ITERATION_S = 10_000, 200, 0.05
COMPARISONS, PROMPTS, SAMPLES = 2000, 100, 4
RUNS = 2


def task_gap_s() -> float:
    """Median seconds between the engine jobs of tasks that follow each other directly."""
    from tests.pipeline.airflow_stack import Airflow
    from tests.pipeline.conftest import write_engine

    gaps: list[float] = []
    folder = Path(tempfile.mkdtemp())
    with Airflow(folder, write_engine(folder / "python")) as airflow:
        airflow.plan({"scores": {"stage_": 0.5}})
        for k in range(RUNS):
            run = airflow.api.trigger("train_ppo", {"preset": "tiny", "stages": 2, "approval": "human"}, f"run-{k}")
            airflow.finished(run, seconds=600)
            tasks = airflow.api.tasks("train_ppo", run)
            for task, after in (("stage_1.train", "stage_1.evaluate"), ("stage_2.train", "stage_2.evaluate")):
                ended = json.loads((airflow.job(run, task) / "exit.json").read_text())["finished"]
                began = json.loads((airflow.job(run, after) / "job.json").read_text())["started"]
                gaps.append(began - ended)
                between = _seconds(tasks[task], tasks[after])
                print(f"  {task} -> {after}: {gaps[-1]:.2f} s, of it {between:.2f} s between the two tasks")
    shutil.rmtree(folder)
    return statistics.median(gaps)


def _seconds(before: dict[str, Any], after: dict[str, Any]) -> float:
    from datetime import datetime

    ended, began = (datetime.fromisoformat(text.replace("Z", "+00:00")) for text in (
        before["end_date"], after["start_date"]))
    return (began - ended).total_seconds()


def report_s() -> float:
    """Seconds of a report stage over many iterations."""
    with tempfile.TemporaryDirectory() as folder:
        _in_engine("write_report_inputs", folder)
        command = [str(ENGINE), "-m", "engine", "report", folder]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)  # byte code, matplotlib's list of fonts
        seconds = []
        for _ in range(3):
            begin = time.perf_counter()
            subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
            seconds.append(time.perf_counter() - begin)
        size = Path(folder, "report", "report.html").stat().st_size
    print(f"  {REPORT_ITERATIONS:,} iterations: {min(seconds):.2f} to {max(seconds):.2f} s, {size / 1e3:.0f} kB")
    return statistics.median(seconds)


def mlflow_ms_per_iteration() -> float:
    """Milliseconds of training time that the tracker takes in each iteration."""
    from tests.mlflow_server import MlflowServer

    with tempfile.TemporaryDirectory() as folder:
        server = MlflowServer(Path(folder)).start()
        try:
            job = Path(folder, "job")
            job.mkdir()
            said = json.loads(_in_engine("track", str(job), MLFLOW_TRACKING_URI=server.uri))
        finally:
            server.stop()
    assert said["arrived"] == TRACKED_ITERATIONS, f"{said['arrived']} of {TRACKED_ITERATIONS} iterations reached MLflow"
    print(f"  {said['log_ms']:.2f} ms a call (mean {said['mean_ms']:.2f}, longest {said['longest_ms']:.1f}; without "
          f"MLflow {said['files_ms']:.2f}), {said['close_s']:.2f} s at the end\n"
          f"  {len(METRICS)} metrics, {TRACKED_ITERATIONS} iterations of {1000 * ITERATION_S:.0f} ms")
    return said["log_ms"] + 1000 * said["close_s"] / TRACKED_ITERATIONS


def false_promotion_rate() -> float:
    """Share of comparisons without a difference that the gate passes."""
    import numpy as np

    from engine.spec import GatePolicy, ModelEvaluation, PromptScores
    from engine.statistics import summarise
    from tasks.gates import GateEvidence, gate

    rng = np.random.default_rng(0)
    policy = GatePolicy(bootstrap_samples=1000, min_prompts=50)

    def evaluation(name: str, scores: Any) -> ModelEvaluation:
        prompts = [PromptScores(id=str(k), task="t", greedy=float(row[0]), sampled=row.tolist(),
                                lengths=[1] * (SAMPLES + 1)) for k, row in enumerate(scores)]
        return ModelEvaluation(model=name, weights_hash=name, prompts_hash="p", settings_hash="s", prompts=prompts,
                               metrics=summarise(prompts, 1.0))

    passed = 0
    for k in range(COMPARISONS):
        ability = rng.beta(1, 1, (PROMPTS, 1))
        drawn = [rng.random((PROMPTS, SAMPLES)) for _ in range(2)]
        # Right or wrong, and rewards in between; prompts differ in how hard they are.
        scores = [(d < ability).astype(float) if k % 2 else ability + 0.3 * (d - 0.5) for d in drawn]
        champion, candidate = (evaluation(name, s) for name, s in zip(("champion", "candidate"), scores, strict=True))
        passed += gate(GateEvidence(candidate=candidate, champion=champion, files_hash="candidate"), policy).passed
    print(f"  {passed} of {COMPARISONS} comparisons without a difference passed; the gate's level is {policy.alpha:g}")
    return passed / COMPARISONS


def write_report_inputs(folder: str) -> None:
    """In the engine's environment: a report job over many iterations."""
    import numpy as np

    from engine.spec import Evaluation, ModelEvaluation, PromptScores, ReportSpec, SampleRecord, dump_spec
    from engine.statistics import summarise

    rng = np.random.default_rng(0)
    names = ["reward/mean", "reward/std", "actor/kl_to_reference", "actor/entropy", "actor/grad_norm",
             "critic/grad_norm", "rollout/response_tokens_mean", "rollout/response_tokens_max", "rollout/tokens_per_s",
             "time/generate_s", "time/score_s", "time/update_s", "time/other_s", "time/iteration_s",
             "time/samples_per_s", *METRICS[:20]]
    half = REPORT_ITERATIONS // 2
    for stage in (1, 2):
        values = rng.random((half, len(names)))
        lines = [json.dumps({"step": half * (stage - 1) + k + 1, "time": float(k),
                             "metrics": dict(zip(names, row, strict=True))}) for k, row in enumerate(values.tolist())]
        Path(folder, f"stage_{stage}.jsonl").write_text("\n".join(lines) + "\n")
    models, samples = [], []
    for name in ("base", "candidate"):
        prompts = [PromptScores(id=f"p{k}", task="t", greedy=row[0], sampled=row.tolist(), lengths=[5] * 5)
                   for k, row in enumerate(rng.random((200, 4)))]
        models.append(ModelEvaluation(model=name, weights_hash=name, prompts_hash="p", prompts=prompts,
                                      metrics=summarise(prompts, 1.0)))
        samples += [SampleRecord(model=name, id=p.id, task="t", prompt="2 + 2 = ?", answer="4", tokens=5,
                                 response=f"{name} {p.id}", greedy=True, score=p.greedy) for p in prompts]
    Path(folder, "evaluation.json").write_text(Evaluation(models=models).model_dump_json())
    Path(folder, "samples.jsonl").write_text("".join(sample.model_dump_json() + "\n" for sample in samples))
    Path(folder, "spec.json").write_text(dump_spec(ReportSpec(
        title="benchmark", metrics=[f"{folder}/stage_{stage}.jsonl" for stage in (1, 2)], output=f"{folder}/out",
        evaluation=f"{folder}/evaluation.json", samples=f"{folder}/samples.jsonl")))


def track(folder: str) -> None:
    """In the engine's environment: log as a training loop does."""
    from mlflow import MlflowClient

    from engine.spec import TrackingSpec
    from engine.tracking import Tracker

    client = MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    run = client.create_run("0").info.run_id
    found = {}
    for name, spec in (("files", TrackingSpec()), ("mlflow", TrackingSpec(run_id=run))):
        calls = []
        directory = Path(folder, name)
        directory.mkdir()
        tracker = Tracker(directory, spec)
        for step in range(TRACKED_ITERATIONS):
            until = time.perf_counter() + ITERATION_S
            while time.perf_counter() < until:  # works, as training does: the sending thread has to share
                sum(range(1000))
            begin = time.perf_counter()
            tracker.log(step, {metric: float(step) for metric in METRICS})
            calls.append(1000 * (time.perf_counter() - begin))
        found[f"{name}_ms"] = statistics.median(calls)
    begin = time.perf_counter()
    tracker.close()
    closing = time.perf_counter() - begin
    print(json.dumps({
        "log_ms": found["mlflow_ms"], "files_ms": found["files_ms"], "mean_ms": statistics.fmean(calls),
        "longest_ms": max(calls), "close_s": closing, "arrived": len(client.get_metric_history(run, METRICS[-1]))}))


def _in_engine(function: str, argument: str, **environment: str) -> str:
    """Run a function of this file in the engine's environment; its last line."""
    folder = str(ROOT / "benchmarks")
    code = f"import sys; sys.path.insert(0, {folder!r}); import pipeline; pipeline.{function}({argument!r})"
    done = subprocess.run([str(ENGINE), "-c", code], cwd=ROOT, env={**os.environ, **environment}, check=True,
                          stdout=subprocess.PIPE, text=True)
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


MEASURES: tuple[Callable[[], float], ...] = (false_promotion_rate, report_s, mlflow_ms_per_iteration, task_gap_s)


def main() -> None:
    """Print what was measured, and as the last line one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=[measure.__name__ for measure in MEASURES])
    only = parser.parse_args().only
    found = {}
    for measure in MEASURES:
        if only in (None, measure.__name__):
            print(measure.__name__, flush=True)
            found[measure.__name__] = round(measure(), 4)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
