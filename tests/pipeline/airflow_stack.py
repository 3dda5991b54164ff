"""Airflow and MLflow for tests: the product's own local stack in a directory of its own, its engine a stand-in."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tasks import jobs
from tasks.airflow_api import AirflowAPI
from tasks.launchers.processes import Mark
from tasks.stack import USER, Databases, Stack, free_port
from tests.pipeline.examples import preset

FINAL = ("success", "failed", "skipped", "upstream_failed", "removed")
MAX_STAGES = 3
NEW_YEAR = "0 0 1 1 *"
"""A cron whose ticks no test meets by chance."""


class Airflow:
    """A running stack, and what tests do with it."""

    def __init__(self, home: Path, engine: Path, databases: Databases | None = None,
                 environment: dict[str, str] | None = None):
        """Args: home: an empty directory; engine: the engine's interpreter or its stand-in; databases: not SQLite."""
        self.home = home
        self.plan_file = home / "plan.json"
        self.plan({})
        (home / "presets").mkdir()
        self.write_preset("tiny", preset(gate={"approval": "automatic"}))
        self.write_preset("retrained", preset(
            registry={"model": "retrained"}, stages={"count": 1}, gate={"approval": "automatic"}))
        write_model(home / "models" / "tiny")
        real = yaml.safe_load(Path("examples/tiny.yaml").read_text())
        self.write_preset("real", real | {"model": "models/real", "registry": {"model": "real"}})
        # Another session on this machine must not take the port of a server that was killed and is coming back.
        offset = 10 * (os.getpid() % 200)
        (home / "ports.json").write_text(json.dumps(
            {"airflow": free_port(28080 + offset), "mlflow": free_port(25000 + offset)}))
        self.stack = Stack(home, databases=databases, environment={
            "RATCHET_ENGINE_PYTHON": str(engine), "RATCHET_FAKE_PLAN": str(self.plan_file),
            "RATCHET_ENGINE_ENV": "RATCHET_FAKE_PLAN",
            "RATCHET_PRESETS": str(home / "presets"), "RATCHET_MAX_STAGES": str(MAX_STAGES),
            "RATCHET_PROMPTS": str(home / "inbox"), "RATCHET_LANDING_CRON": NEW_YEAR,
            "RATCHET_RETRAIN_PRESET": "retrained", "RATCHET_RETRAIN_CRON": NEW_YEAR} | (environment or {}))

    def __enter__(self) -> "Airflow":
        try:
            self.stack.start()
            self.api = AirflowAPI(self.stack.airflow_url, USER, self.stack.password)
            wanted = {path.stem for path in Path("dags").glob("*.py")}
            self.wait(lambda: wanted <= {dag["dag_id"] for dag in self.api.call("GET", "/dags")["dags"]})
        except BaseException:
            self.stack.stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        processes = self.stack.processes()
        self.stack.stop()
        # Orphans that were killed are there until init reaps them.
        deadline = time.monotonic() + 5
        while (left := [pid for pid in processes if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert processes and not left, f"the stack left processes: {left}"

    def write_preset(self, name: str, content: dict[str, Any]) -> None:
        """Make a preset selectable."""
        (self.home / "presets" / f"{name}.yaml").write_text(yaml.safe_dump(content))

    def plan(self, behaviours: dict[str, Any]) -> None:
        """What the stand-in does from now on: by task and attempt, and `scores` by a part of a model's URI."""
        self.plan_file.write_text(json.dumps(behaviours))

    def job(self, run_id: str, task_id: str, dag_id: str = "train_ppo") -> Path:
        """The job directory of a task."""
        return jobs.job_directory(self.home, dag_id, run_id, task_id)

    def attempts(self, run_id: str, dag_id: str = "train_ppo") -> dict[str, int]:
        """Attempts of a run's jobs so far, by task."""
        directory = self.job(run_id, "any", dag_id).parent
        return {path.parent.name: int(path.read_text()) for path in directory.glob("*/attempt")}

    @contextlib.contextmanager
    def second_scheduler(self) -> Iterator[None]:
        """While inside, two schedulers work on the same database."""
        second = subprocess.Popen(
            [sys.executable, "-m", "airflow", "scheduler", "--skip-serve-logs"], env=self.stack.environment(),
            cwd=self.home, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        alive = "/jobs?job_type=SchedulerJob&job_state=running&is_alive=true"
        try:
            self.wait(lambda: len(self.api.call("GET", alive)["jobs"]) == 2)
            yield
            assert len(self.api.call("GET", alive)["jobs"]) == 2
        finally:
            Mark(self.home, None, frozenset({second.pid})).end(grace_s=5.0)
            second.wait()

    def wait(self, condition: Any, seconds: float = 180.0) -> Any:
        """Wait until `condition()` is true; its value."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < deadline, f"waited {seconds} s in vain"
            time.sleep(0.3)
        return value

    def finished(self, run_id: str, dag_id: str = "train_ppo", seconds: float = 180.0) -> dict[str, str]:
        """Wait until a DAG run has ended; states by task id."""
        self.wait(lambda: self.api.run(dag_id, run_id)["state"] in ("success", "failed"), seconds)
        return {task: ti["state"] for task, ti in self.api.tasks(dag_id, run_id).items()}

    def asked(self, review: str, seconds: float = 180.0) -> None:
        """Wait until a review asks a person, and an answer counts.

        Airflow 3.3 loses an answer that comes before its scheduler has read that the task waits: it takes the task for
        failed, and asks once more.
        """
        says = ("TaskInstance Finished", f" task_id=approve, run_id={review},", " state=deferred,")
        log = self.home / "logs" / "scheduler.log"
        self.wait(lambda: any(all(part in line for part in says) for line in log.read_text().splitlines()), seconds)

    def review_of(self, train_run: str) -> str:
        """Wait for the review that the candidate of a training run started; its run id."""
        made = self.api.xcom("train_ppo", train_run, "register")

        def find() -> str | None:
            for run in self.api.runs("review_candidate"):
                loaded = self.api.xcom("review_candidate", run["dag_run_id"], "load")
                if loaded and loaded["candidate"] == made["version"] and loaded["model"] == made["model"]:
                    return run["dag_run_id"]
            return None

        return self.wait(find)


def write_model(directory: Path) -> None:
    """What of a model directory the pipeline side reads: a config, and files to hash."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({
        "model_type": "qwen2", "num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 384,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}))
    (directory / "model.safetensors").write_bytes(b"base")
