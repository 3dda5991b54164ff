"""`make demo`: train, evaluate, review and promote a small model on this machine, and watch it.

Starts Airflow and MLflow (or uses the ones that run in the same home), triggers `train_ppo` over Airflow's REST API,
shows its progress, waits for the review that its candidate starts, prints what changed. In a terminal the two UIs then
stay up until Ctrl-C; otherwise, or with `--exit`, it ends. Runs in the pipeline's environment.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from engine.errors import FaultError, RefusedError
from tasks import deployment, jobs, pipeline, stages
from tasks.airflow_api import AirflowAPI
from tasks.stack import ROOT, USER, Stack, read_password, running_stack, stopped_by_signals

ENGINE = ROOT / ".venv" / "engine" / "bin" / "python"
MODEL_BYTES = {"tiny": 200 << 20, "smollm2": 3 << 30}
"""Disk that a run on each example model needs: the model, checkpoints with optimizer state, exports, logs."""
FIRST_REVIEW_S = 120.0
SHOWN = (("mean_reward", "mean reward"), ("greedy_reward", "greedy reward"), ("pass_at_1", "pass@1"),
         ("format_error_share", "format errors"), ("response_tokens", "response tokens"))


class DemoError(RuntimeError):
    """The demo cannot go on; its message is the one sentence the user gets."""


def main() -> int:
    """Run the demo; 0 when its training run succeeded, whatever the review decided."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default="default", help="a file of examples/, without .yaml")
    parser.add_argument("--home", type=Path, default=ROOT / ".ratchet", help="where everything is kept")
    parser.add_argument("--exit", action="store_true", help="end when the run has ended, also in a terminal")
    options = parser.parse_args()
    home = options.home.resolve()
    os.environ["RATCHET_HOME"] = str(home)
    os.environ.setdefault("RATCHET_ENGINE_PYTHON", str(ENGINE))
    stay = sys.stdout.isatty() and not options.exit
    stack: Stack | None = None
    with stopped_by_signals():
        try:
            plan = check(options.preset, home)
            stack, urls = open_stack(home)
            demo = Demo(AirflowAPI(urls["airflow"], USER, read_password(home)), home, plan)
            demo.show(demo.train(options.preset))
            print(f"\nAirflow  {urls['airflow']}  (user {USER}, password {read_password(home)})")
            print(f"MLflow   {urls['mlflow']}")
            if stay:
                print("Ctrl-C stops both." if stack else "They were running before and stay.")
                wait_for_interrupt(stack)
            return 0
        except KeyboardInterrupt:
            print("\nStopping")
            return 130
        except (DemoError, FaultError, RefusedError) as error:
            print(f"\nerror: {error}", file=sys.stderr)
            return 1
        finally:
            if stack is not None:
                stack.stop()


def check(preset: str, home: Path) -> pipeline.Pipeline:
    """What can be known to fail is said before anything starts; makes the model when it is missing."""
    plan = stages.resolve(pipeline.read_preset(deployment.presets(), preset), stages.Form(), {})
    python = os.environ["RATCHET_ENGINE_PYTHON"]
    if not os.access(python, os.X_OK):
        raise DemoError(f"{python} is missing; `make setup` builds the engine's environment")
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    model = Path(stages.absolute_uri(plan.model, str(home)))
    needed, free = MODEL_BYTES.get(model.name, 1 << 30), shutil.disk_usage(home).free
    if free < needed:
        raise DemoError(f"{home} has {free / 2**30:.1f} GB free and the preset {preset} needs {needed / 2**30:.1f} GB; "
                        "free some, or give another --home")
    if not (model / "config.json").exists():
        print(f"Making the model {model.name}", flush=True)
        made = subprocess.run(
            [python, str(ROOT / "examples" / "models.py"), model.name, str(model)],
            capture_output=True, text=True)
        if made.returncode:
            last = (made.stderr.strip().splitlines() or ["no output"])[-1]
            raise DemoError(f"cannot make the model {model.name}: {last.removeprefix('error: ')}")
    return plan


def open_stack(home: Path) -> tuple[Stack | None, dict[str, str]]:
    """The stack that runs in this home already (not ours to stop: None), or a new one."""
    found = running_stack(home)
    if found:
        print(f"Using the Airflow at {found['airflow']}")
        return None, found
    begin = time.monotonic()
    print("Starting Airflow and MLflow", flush=True)
    stack = Stack(home, say=lambda line: print(f"  {line}", flush=True))
    try:
        stack.start()
    except BaseException:
        stack.stop()
        raise
    print(f"  ready after {time.monotonic() - begin:.0f} s: {stack.airflow_url}, {stack.mlflow_url}", flush=True)
    return stack, {"airflow": stack.airflow_url, "mlflow": stack.mlflow_url}


def wait_for_interrupt(stack: Stack | None) -> None:
    """Keep the UIs up until Ctrl-C."""
    while stack is not None:
        time.sleep(3600)


class Demo:
    """One training run and its review, seen through Airflow's API and the job directories."""

    def __init__(self, api: AirflowAPI, home: Path, plan: pipeline.Pipeline):
        self.api, self.home, self.plan = api, home, plan
        self.line = Line()

    def train(self, preset: str) -> str:
        """Start a training run, or follow the one that an interrupted demo left; returns when it has succeeded."""
        self._wait_for_dags()
        left = [r for r in self.api.runs("train_ppo") if r["state"] in ("running", "queued")]
        if left:
            run = left[-1]["dag_run_id"]
            print(f"Going on with the run {run}, which an earlier demo left", flush=True)
        else:
            run = self.api.trigger("train_ppo", {"preset": preset, "start_from": "champion"})
            print(f"Started train_ppo {run}", flush=True)
        self._follow("train_ppo", run)
        return run

    def show(self, run: str) -> None:
        """Wait for the review; print what it decided, what changed, and where the report is."""
        made = self.api.xcom("train_ppo", run, "register")
        review = self._review_of(made)
        candidate = f"{made['model']}/{made['version']}"
        print(f"Candidate {candidate} is registered; review_candidate {review} decides", flush=True)
        self._follow("review_candidate", review)
        print()
        self._table(run, made["stage"])
        rejected = self.api.xcom("review_candidate", review, "reject")
        verdict = self.api.xcom("review_candidate", review, "gate")
        if rejected:
            print(f"\nNot promoted: {candidate} was rejected by {rejected['by']}: {rejected['reason']}")
        elif again := self.api.xcom("review_candidate", review, "review_again"):
            print(f"\nNot promoted yet: {again['reason']}; a new review has started")
        else:
            print(f"\nPromoted: {candidate} is the champion. {verdict}")
        print(f"Report   {self.api.xcom('train_ppo', run, 'report')['outputs']['report']}")
        print(f"Run      {self.api.xcom('train_ppo', run, 'begin')['mlflow']}")

    def _wait_for_dags(self) -> None:
        deadline = time.monotonic() + FIRST_REVIEW_S
        while {"train_ppo", "review_candidate"} - {dag["dag_id"] for dag in self.api.call("GET", "/dags")["dags"]}:
            if time.monotonic() > deadline:
                errors = self.api.call("GET", "/importErrors")["import_errors"]
                last = errors[0]["stack_trace"].strip().splitlines()[-1] if errors else "no import error is reported"
                raise DemoError(f"Airflow does not know the DAGs: {last}; see {self.home}/logs/dag-processor.log")
            time.sleep(0.5)

    def _follow(self, dag_id: str, run: str) -> None:
        said = ""
        while (state := self.api.run(dag_id, run)["state"]) not in ("success", "failed"):
            tasks = self.api.tasks(dag_id, run)
            waiting = [name for name, ti in tasks.items() if ti["state"] == "deferred"]
            if waiting and not said:
                said = f"{self.api.url}/dags/{dag_id}/runs/{run}/tasks/{waiting[0]}/required_actions"
                self.line.keep(f"The review waits for a person: {said}")
            self.line.show(self._status(dag_id, run, tasks))
            time.sleep(1.0)
        self.line.clear()
        if state == "failed":
            raise DemoError(self._why_failed(dag_id, run))

    def _status(self, dag_id: str, run: str, tasks: dict[str, Any]) -> str:
        active = [name for name, ti in tasks.items() if ti["state"] in ("running", "queued", "up_for_retry")]
        if not active:
            return ""
        # The engine's task when there is one: it is what takes the time.
        name = max(active, key=lambda task: task.endswith(("train", "evaluate")))
        stage, _, step = name.rpartition(".")
        words = [f"{stage.replace('_', ' ')} of {self.plan.stages.count}, {step}" if stage else step]
        if tasks[name]["state"] == "up_for_retry":
            words.append("failed, will be tried again")
        progress = jobs.read_json(jobs.job_directory(self.home, dag_id, run, name) / "progress.json")
        return " · ".join([*words, *(progress_words(progress) if progress else [])])

    def _review_of(self, made: dict[str, Any]) -> str:
        deadline = time.monotonic() + FIRST_REVIEW_S
        while time.monotonic() < deadline:
            for run in self.api.runs("review_candidate"):
                found = self.api.xcom("review_candidate", run["dag_run_id"], "load")
                if found and (found["model"], found["candidate"]) == (made["model"], made["version"]):
                    return run["dag_run_id"]
            time.sleep(1.0)
        raise DemoError(f"no review of {made['model']}/{made['version']} started within {FIRST_REVIEW_S:.0f} s")

    def _table(self, run: str, stage: int) -> None:
        metrics = self.api.xcom("train_ppo", run, stages.evaluate_task(stage))["metrics"]
        count = int(metrics["base/num_prompts"])
        print(f"{f'{count} held-out prompts':24}{'before':>24}{'after':>24}")
        for name, words in SHOWN:
            print(f"{words:24}{value(metrics, 'base', name):>24}{value(metrics, stages.stage_name(stage), name):>24}")

    def _why_failed(self, dag_id: str, run: str) -> str:
        tasks = self.api.tasks(dag_id, run)
        failed = [name for name, ti in tasks.items() if ti["state"] == "failed"]
        if not failed:
            return f"{dag_id} {run} failed"
        lines = self.api.log(dag_id, run, failed[0], tasks[failed[0]]["try_number"]).splitlines()
        said = next((line for line in reversed(lines) if "error:" in line or "Error" in line), "see its log")
        return f"task {failed[0]} of {dag_id} {run} failed: {said}"


class Line:
    """One status line, redrawn in place in a terminal and printed when it changes anywhere else."""

    def __init__(self) -> None:
        self._live = sys.stdout.isatty()
        self._last = ""

    def show(self, text: str) -> None:
        """Replace the line."""
        if text == self._last or not text:
            return
        self._last = text
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\033[K{text[:width]}" if self._live else text, end="" if self._live else "\n", flush=True)

    def keep(self, text: str) -> None:
        """Print something that stays."""
        self.clear()
        print(text, flush=True)

    def clear(self) -> None:
        """Remove the line."""
        if self._live and self._last:
            print("\r\033[K", end="", flush=True)
        self._last = ""


def progress_words(progress: dict[str, Any]) -> list[str]:
    """What progress.json says, for a person."""
    words = []
    if progress["of"]:
        words.append(f"{progress['phase']} {progress['iteration']} of {progress['of']}")
    elif progress["phase"] != "start":
        words.append(progress["phase"])
    if "reward" in progress:
        words.append(f"reward {progress['reward']:.3f}")
    if "tokens_per_s" in progress:
        words.append(f"{progress['tokens_per_s']:.0f} tokens/s")
    if progress.get("eta_s") is not None:
        words.append(f"{int(progress['eta_s']) // 60}:{int(progress['eta_s']) % 60:02} left")
    return words


def value(metrics: dict[str, float], model: str, name: str) -> str:
    """A metric with its 95 % interval when it has one."""
    if f"{model}/{name}" not in metrics:
        return "-"
    mean = metrics[f"{model}/{name}"]
    if f"{model}/{name}_low" not in metrics:
        return f"{mean:.3f}"
    return f"{mean:.3f} [{metrics[f'{model}/{name}_low']:.3f}, {metrics[f'{model}/{name}_high']:.3f}]"


if __name__ == "__main__":
    sys.exit(main())
