"""The same training with nobody disturbing it: the engine alone, on local files, by the specs that a run writes."""

import json
import subprocess
from pathlib import Path
from typing import Any

from engine.spec import RunResult, dump_spec
from tasks import stages
from tests.pipeline.fake_engine import REAL_ENGINE

MEASURED = ("time/", "memory/", "rollout/tokens_per_s", "rewards/")
"""Metrics of the machine and not of the model."""


class Undisturbed:
    """Prompts and stages of a preset, trained once."""

    def __init__(self, preset: dict[str, Any], model: Path, directory: Path):
        plan = stages.resolve(preset, stages.Form(), {})
        self._directory = directory
        self.results: dict[str, RunResult] = {}
        run = stages.Run(pipeline=plan, root=str(directory / "run"), evaluations="", base_model=str(model),
                         results=self.results)
        self._run("prepare", stages.prepare_spec(run))
        for stage in range(1, plan.stages.count + 1):
            self._run(stages.train_task(stage), stages.train_spec(run, stage))

    def _run(self, task: str, spec: Any) -> None:
        job = self._directory / task
        job.mkdir(parents=True)
        (job / "spec.json").write_text(dump_spec(spec))
        done = subprocess.run([REAL_ENGINE, "-u", "-m", "engine", spec.stage, str(job)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        self.results[task] = RunResult.model_validate_json((job / "result.json").read_text())

    def metrics(self, task: str) -> list[tuple[int, dict[str, float]]]:
        """See `learned`."""
        return learned(self._directory / task)


def learned(job: Path) -> list[tuple[int, dict[str, float]]]:
    """Step and metrics of every line of a job's metrics.jsonl, without those of the machine."""
    rows = [json.loads(line) for line in (job / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], {k: v for k, v in row["metrics"].items() if not k.startswith(MEASURED)}) for row in rows]
