"""How long a run stands still after a kill, what a stage costs beside its iterations, and what checkpoints cost.

    .venv/pipeline/bin/python benchmarks/recovery.py [--preset default] [--iterations 5] [--repeats 3]

Three parts. The preset's model with its Adam state is saved and loaded as a checkpoint and by plain safetensors, as
many bytes, both synced to disk. Under a local stack of its own (Airflow, MLflow) a stage of the preset runs
`iterations` iterations, and what is not an iteration is put over a stage of 20. There the tiny preset's training is
killed in several ways, each `repeats` times. Last line: one JSON object.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

ENGINE = ROOT / ".venv" / "engine" / "bin" / "python"
STAGE_ITERATIONS = 20
ENDLESS = 100_000
LIMIT_S = 900.0
TRAIN = "stage_1.train"
FAULTS = ("rank", "wrapper", "task", "scheduler", "api-server", "everything")
STOPPING = ("rank", "wrapper", "everything")
"""Faults that end the engine."""
REPLACING = ("task", "scheduler", "everything")
"""Faults after which another process follows the engine; the old one of a dead scheduler lives a little longer."""


@dataclass
class Place:
    """A stack and what is asked of it."""

    stack: Any
    api: Any

    def start(self, run_id: str, conf: dict[str, Any]) -> float:
        """Trigger `train_ppo`; when."""
        begin = time.monotonic()
        self.api.trigger("train_ppo", conf, run_id)
        return begin

    def job(self, run_id: str) -> Path:
        """The directory of a run's first training job."""
        from tasks import jobs

        return jobs.job_directory(self.stack.home, "train_ppo", run_id, TRAIN)

    def task(self, run_id: str, task_id: str = TRAIN) -> dict[str, Any]:
        """A task instance."""
        return self.api.tasks("train_ppo", run_id)[task_id]


def wait(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of `condition`, asked ten times a second."""
    deadline = time.monotonic() + LIMIT_S
    while not (value := condition()):
        if time.monotonic() > deadline:
            sys.exit(f"error: waited {LIMIT_S:.0f} s for {what}")
        time.sleep(0.1)
    return value


def events(job: Path, name: str) -> list[dict[str, Any]]:
    """Events of this name in the log of a job's attempt."""
    try:
        lines = (job / "log.txt").read_text().splitlines()
    except FileNotFoundError:
        return []
    found = [json.loads(line) for line in lines if line.startswith('{"event"') and line.endswith("}")]
    return [event for event in found if event["event"] == name]


def iterations(job: Path) -> int:
    """Iterations of a job that are trained and counted, over all attempts."""
    try:
        return (job / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def victims(place: Place, run_id: str, fault: str) -> set[int]:
    """Pids of what dies."""
    from tasks.launchers import local

    job = place.job(run_id)
    if fault == "rank":
        return {json.loads((job / "heartbeat").read_text())["pid"]}
    if fault == "wrapper":
        return {json.loads((job / "job.json").read_text())["pid"]}
    if fault == "task":
        return {place.task(run_id)["pid"]}
    if fault == "everything":
        return place.stack.processes() | local.mark_of(job).processes()
    return {place.stack.pid_of(fault)}


def recover(place: Place, run_id: str, fault: str) -> tuple[float, float]:
    """Kill, and wait for the next iteration and for a task that follows it; seconds to each."""
    from tasks.launchers.processes import send

    job = place.job(run_id)
    doomed = victims(place, run_id, fault)
    attempt = (job / "attempt").read_text()
    replaced = doomed | ({place.task(run_id)["pid"]} if fault in REPLACING else set())
    before, begin = iterations(job), time.monotonic()
    send(doomed, signal.SIGKILL)
    if fault in STOPPING:
        wait(lambda: (job / "attempt").read_text() != attempt, f"another attempt after {fault}")
    else:
        before += 1  # the one that was on its way
    wait(lambda: iterations(job) > before, f"training after {fault}")
    training = time.monotonic() - begin
    wait(lambda: followed(place, run_id, replaced), f"a task after {fault}")
    task = time.monotonic() - begin
    seen = (job / "followed").stat().st_mtime_ns
    # What is marked failed before its task has taken the engine over leaves the engine behind.
    wait(lambda: (job / "followed").stat().st_mtime_ns != seen, f"a task that follows after {fault}")
    return training, task


def followed(place: Place, run_id: str, doomed: set[int]) -> bool:
    """Whether a live task shows the engine's log."""
    from engine.errors import FaultError

    try:
        task = place.task(run_id)
    except FaultError:
        return False
    return task["state"] == "running" and task["pid"] not in doomed and Path(f"/proc/{task['pid']}").exists()


def measure_kills(place: Place, repeats: int) -> dict[str, tuple[float, float]]:
    """Medians by fault."""
    found = {}
    for fault in FAULTS:
        # A run a fault: each has all its retries.
        run_id = f"kills-{fault}"
        place.start(run_id, {"preset": "tiny", "stages": 1, "iterations": ENDLESS, "override": json.dumps(
            {"train": {"checkpoint_every": 1, "prompts_per_iteration": 16}})})
        pairs = []
        for _ in range(repeats):
            reached = iterations(place.job(run_id))
            wait(lambda reached=reached, run_id=run_id: iterations(place.job(run_id)) > reached + 2, "iterations")
            pairs.append(recover(place, run_id, fault))
        place.api.set_state("train_ppo", run_id, TRAIN, "failed")
        wait(lambda run_id=run_id: place.api.run("train_ppo", run_id)["state"] == "failed", "the end of a run")
        found[fault] = tuple(statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"{fault:12} {found[fault][0]:9.1f} s to training {found[fault][1]:9.1f} s to a task that follows it, "
              f"median of {repeats}", flush=True)
    return found


def measure_stage(place: Place, preset: str, count: int) -> dict[str, float]:
    """One stage under Airflow: what is not an iteration, and what saving makes the training wait for."""
    run_id = "stage"
    # Three saves or more, since the first one also finds its memory; the last runs beside the export.
    begin = place.start(run_id, {"preset": preset, "stages": 1, "iterations": count, "override": json.dumps(
        {"train": {"checkpoint_every": max(1, (count - 1) // 2)}})})
    job = place.job(run_id)
    wait(lambda: events(job, "ready"), "the engine")
    ready = time.monotonic() - begin
    wait(lambda: place.task(run_id)["state"] in ("success", "failed"), "the stage")
    task = place.task(run_id)
    if task["state"] != "success":
        sys.exit(f"error: the stage failed; see {job}/log.txt")
    before = [place.task(run_id, name) for name in ("reward_model", "dpo")]
    stage_s = seconds(task["end_date"]) - max(seconds(other["end_date"]) for other in before)
    rows = [json.loads(line)["metrics"] for line in (job / "metrics.jsonl").read_text().splitlines()]
    # The first iteration pays for what is built lazily: that is part of the overhead.
    iteration_s = statistics.median(row["time/iteration_s"] for row in rows[1:])
    overhead_s = stage_s - count * iteration_s
    saves = events(job, "checkpoint")
    training_s = STAGE_ITERATIONS * iteration_s
    started = seconds(task["start_date"])
    attempt = json.loads((job / "job.json").read_text())
    print(f"{preset}: {count} iterations of {iteration_s:.1f} s in {stage_s:.1f} s, beside them {overhead_s:.1f} s:")
    parts = {
        "until the task runs": started - (seconds(task["end_date"]) - stage_s),
        "until the job starts": attempt["started"] - started,
        "until the engine is ready": events(job, "ready")[0]["s"],
        "longer first iteration": rows[0]["time/iteration_s"] - iteration_s}
    # Python's own start, before the engine's clock runs, is in here too.
    parts["start of Python, save, export"] = overhead_s - sum(parts.values())
    for name, value in parts.items():
        print(f"  {name:30}{value:8.1f} s")
    for save in saves:
        print(f"  a save of {save['whole_s']:.1f} s, of which the training waited {save['blocked_s']:.2f} s")
    # Generation begins when the first weights have reached vLLM; the prefill of the first prompts is not in it.
    generating = ready + rows[0]["time/transition_s"]
    return {
        "submit_to_first_token_s": generating, "stage_overhead_s": overhead_s, "iteration_s": iteration_s,
        "stage_overhead_share": overhead_s / (overhead_s + training_s),
        "save_block_share": statistics.median(save["blocked_s"] / save["whole_s"] for save in saves),
        "save_block_training_share": statistics.median(save["blocked_s"] for save in saves) / iteration_s}


def seconds(date: str) -> float:
    """Seconds since the epoch of an API's date."""
    return datetime.fromisoformat(date).timestamp()


def measure_checkpoints(model: Path, scratch: Path, repeats: int) -> dict[str, float]:
    """Runs `checkpoint_speeds` in the engine's environment."""
    arguments = f"{str(model)!r}, {str(scratch)!r}, {repeats}"
    code = f"from benchmarks.recovery import checkpoint_speeds; checkpoint_speeds({arguments})"
    done = subprocess.run([str(ENGINE), "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def checkpoint_speeds(model: str, scratch: str, repeats: int) -> None:
    """Save and load the model with its Adam state both ways; print megabytes a second."""
    import torch
    from safetensors.torch import load_file, save_file

    from engine.backends.megatron.parallel import start_world
    from engine.backends.megatron.trainer import TrainedModel, load_network
    from engine.checkpoint import CheckpointFiles, Checkpoints
    from engine.layout import ParallelLayout
    from engine.spec.train import OptimizerSpec

    world = start_world(ParallelLayout(), seed=0)
    actor = TrainedModel(world, load_network(Path(model), world, "logprobs"), 4096, OptimizerSpec(lr=1e-5), 10)
    checkpoints = Checkpoints(CheckpointFiles(Path(scratch) / "checkpoints", keep_last=1), world)
    times: dict[str, list[float]] = {"save": [], "load": [], "plain_save": [], "plain_load": []}

    def timed(name: str, action: Callable[[], Any]) -> None:
        begin = time.perf_counter()
        action()
        times[name].append(time.perf_counter() - begin)

    def save_plain(tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, plain)
        with open(plain) as file:
            os.fsync(file.fileno())

    plain, folder = Path(scratch) / "plain.safetensors", Path(scratch) / "checkpoints"
    for step in range(1, repeats + 2):
        timed("save", lambda step=step: (checkpoints.save(step, {"actor": actor}, {}), checkpoints.wait()))
        timed("load", lambda: checkpoints.load({"actor": actor}))
        size = sum(path.stat().st_size for path in folder.glob("step-*/**/*") if path.is_file())
        tensors = {f"{i}": torch.rand(size // 12) for i in range(3)}  # parameters and both moments, in fp32
        timed("plain_save", lambda tensors=tensors: save_plain(tensors))
        timed("plain_load", lambda tensors=tensors: [
            tensors[name].copy_(tensor) for name, tensor in load_file(plain).items()])  # as a model takes them over
    # The first of each warms up.
    print(json.dumps({"bytes": size} | {f"{name}_mb_s": size / 1e6 / statistics.median(values[1:])
                                        for name, values in times.items()}))


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="default")
    parser.add_argument("--iterations", type=int, default=5, help="of the stage, including the first")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    import yaml

    from tasks.airflow_api import AirflowAPI
    from tasks.stack import USER, Stack, stopped_by_signals

    model = yaml.safe_load((ROOT / "examples" / f"{options.preset}.yaml").read_text())["model"]
    with tempfile.TemporaryDirectory() as name, stopped_by_signals():
        home, kept = Path(name) / "home", ROOT / ".ratchet" / "models"
        for wanted in {Path(model).name, "tiny"}:
            subprocess.run([str(ENGINE), str(ROOT / "examples/models.py"), wanted, str(kept / wanted)], check=True,
                           stderr=subprocess.DEVNULL)
        home.mkdir()
        (home / "models").symlink_to(kept)
        speeds = measure_checkpoints(kept / Path(model).name, Path(name), options.repeats)
        for kind in ("save", "load"):
            print(f"{kind} of {speeds['bytes'] / 1e6:.0f} MB: {speeds[f'{kind}_mb_s']:.0f} MB/s, hashed and verified; "
                  f"safetensors {speeds[f'plain_{kind}_mb_s']:.0f} MB/s")
        stack = Stack(home, say=lambda line: print(line, file=sys.stderr, flush=True))
        try:
            stack.start()
            place = Place(stack, AirflowAPI(stack.airflow_url, USER, stack.password))
            wait(lambda: len(place.api.call("GET", "/dags")["dags"]) >= 2, "the DAGs")
            stage = measure_stage(place, options.preset, options.iterations)
            kills = measure_kills(place, options.repeats)
        finally:
            stack.stop()
    print(f"submit to the first token's prefill {stage['submit_to_first_token_s']:.1f} s")
    print(f"overhead {stage['stage_overhead_share']:.1%} of a stage of {STAGE_ITERATIONS} iterations")
    print(f"training waits for {stage['save_block_share']:.1%} of a save; that is "
          f"{stage['save_block_training_share']:.1%} of its own time if it saves every iteration")
    print(json.dumps({
        "kill_to_training_s": statistics.median(kills[fault][0] for fault in STOPPING), **stage,
        **{f"kill_{fault}_to_training_s": pair[0] for fault, pair in kills.items()},
        **{f"kill_{fault}_to_task_s": pair[1] for fault, pair in kills.items()},
        **{name: speeds[name] for name in speeds if name != "bytes"}}))


if __name__ == "__main__":
    main()
