"""Retraining: which landed files the next training takes, and starting it once.

Every training that `retrain` starts has a record, written before it starts and closed when it has ended. What was
trained on is read from the records alone: a file counts as used when the training that had it registered a candidate.

    STORE/retrain/RUN_ID.json     `Training`

The run id is made of the preset and the files' contents, so whoever decides the same starts the same run: a backfill, a
late scheduler or a task tried again finds the run that is there.
"""

import hashlib
import logging
import time
from collections.abc import Sequence
from typing import Any, Literal

import yaml
from airflow.providers.standard.operators.trigger_dagrun import XCOM_RUN_ID, TriggerDagRunOperator
from airflow.providers.standard.triggers.external_task import DagStateTrigger
from airflow.sdk import AssetOrTimeSchedule, CronTriggerTimetable
from airflow.sdk.definitions.context import Context
from airflow.sdk.exceptions import AirflowFailException

from engine import store
from engine.errors import FaultError, MissingError, SpecError
from engine.spec.base import URI, Spec
from tasks import deployment, landing, pipeline, runs, stages
from tasks.assets import PROMPTS
from tasks.operators import airflow_errors, skip

TRAINING_DAG = "train_ppo"
MAX_FILES = 100
"""Landed files of one training."""
TRIES_ALONE = 2
"""A file whose training failed so often without any other landed file is given up."""
ACTIVE = ["queued", "running"]
POLL_S = 10

log = logging.getLogger(__name__)


class LandedFile(Spec):
    """A landed file of a training."""

    sha256: str
    uri: URI


class Training(Spec):
    """A run of `train_ppo` that `retrain` started."""

    run_id: str
    preset: str
    model: str
    """Registered model of the preset: what it has seen counts, under whatever preset."""
    files: list[LandedFile]
    again: bool
    """All of its files were in a training that failed."""
    started_at: float
    """Seconds since the epoch."""
    outcome: Literal["open", "candidate", "failed"] = "open"
    candidate: str = ""
    """Registry version `name/3` that it made."""

    @property
    def hashes(self) -> set[str]:
        """Contents of its files."""
        return {file.sha256 for file in self.files}


def schedule() -> Any:
    """When `retrain` runs: when prompts land, by the deployment's cron, or never when no preset is set."""
    if deployment.retrain_preset() is None:
        return None
    cron = deployment.retrain_cron()
    if cron is None:
        return [PROMPTS]
    return AssetOrTimeSchedule(timetable=CronTriggerTimetable(cron, timezone="UTC"), assets=[PROMPTS])


def choose(**context: Any) -> dict[str, Any]:
    """Decide what to train on and write the training's record; or find the record of the training that goes on.

    Raises:
        AirflowSkipException: nothing is new, or somebody else's training is active.
    """
    with airflow_errors():
        ti = context["ti"]
        preset = context["params"].get("preset")
        if not preset:
            raise SpecError("preset: none is given; set RATCHET_RETRAIN_PRESET for all of Airflow, or choose one")
        trainings = [settle(training, ti) for training in read_trainings()]
        training = next((training for training in trainings if training.outcome == "open"), None)
        if training is None:
            active = ti.get_dr_count(TRAINING_DAG, states=ACTIVE)
            if active:
                skip(f"{active} runs of {TRAINING_DAG} are active; what landed waits for a later run of {ti.dag_id}")
            training = _decide(preset, trainings)
            _write(training)
        log.info("%s: %s", training.run_id, ", ".join(file.uri for file in training.files))
        return {"run_id": training.run_id, "files": len(training.files)}


class TrainOperator(TriggerDagRunOperator):
    """Start the chosen training and wait, without a worker, until it has ended; one that is there is adopted."""

    def __init__(self, **kwargs: Any):
        # How it ended is for the next task to judge.
        super().__init__(trigger_dag_id=TRAINING_DAG, logical_date=None, wait_for_completion=True, deferrable=True,
                         poke_interval=POLL_S, allowed_states=["success", "failed"], failed_states=[],
                         skip_when_already_exists=True, **kwargs)

    def execute(self, context: Context) -> None:
        """Start the run, or wait for the one that has its id."""
        ti = context["ti"]
        with airflow_errors():
            training = _read(ti.xcom_pull(task_ids="choose")["run_id"])
            if training.outcome != "open":
                self.log.info("%s has ended: %s", training.run_id, training.outcome)
                return
            if ti.get_dr_count(TRAINING_DAG, run_ids=[training.run_id]):
                self.log.info("%s is there already; waiting for it", training.run_id)
                ti.xcom_push(key=XCOM_RUN_ID, value=training.run_id)  # for the link of the base class
                self.defer(method_name="execute_complete", trigger=DagStateTrigger(
                    dag_id=TRAINING_DAG, states=self.allowed_states, run_ids=[training.run_id], poll_interval=POLL_S))
            self.trigger_run_id = training.run_id
            self.note = f"Started by {ti.dag_id}/{ti.run_id} with {len(training.files)} landed files"
            self.conf = {"preset": training.preset, "start_from": "champion",
                         "override": yaml.safe_dump(_override(training), sort_keys=False)}
        super().execute(context)


def record(**context: Any) -> dict[str, str]:
    """Close the training's record.

    Raises:
        AirflowFailException: the training registered no candidate; its files are tried again by a later run.
    """
    with airflow_errors():
        run_id = context["ti"].xcom_pull(task_ids="choose")["run_id"]
        training = settle(_read(run_id), context["ti"])
        if training.outcome == "open":
            raise FaultError(f"{TRAINING_DAG} run {run_id} is active again; waiting for its end")
        if training.outcome == "failed":
            raise AirflowFailException(f"{TRAINING_DAG} run {run_id} registered no candidate; see its failed task. Its "
                                       f"files are tried again by a later run of {context['ti'].dag_id}")
        return {"run_id": run_id, "candidate": training.candidate}


def settle(training: Training, ti: Any) -> Training:
    """The record with what became of its run by now, also when a person mended a run that had failed.

    It stays open when the run was not started yet. Then the run is started as it was decided, not decided anew: whoever
    wrote the record may be about to start it.

    Args: ti: the task instance that asks.
    """
    if training.outcome == "candidate":
        return training
    # Asked before looking for the candidate: a run that is not active now will not register one any more.
    is_active = ti.get_dr_count(TRAINING_DAG, run_ids=[training.run_id], states=ACTIVE) > 0
    is_there = ti.get_dr_count(TRAINING_DAG, run_ids=[training.run_id]) > 0
    try:
        made = runs.read_candidate(runs.run_root(TRAINING_DAG, training.run_id))
        return _become(training, "candidate", f"{made.model}/{made.version}")
    except MissingError:
        if is_active or (training.outcome == "open" and not is_there):
            return _become(training, "open")
        return _become(training, "failed")


def next_files(landed: Sequence[landing.Landed], trainings: Sequence[Training]) -> list[landing.Landed]:
    """The landed files that the next training takes; empty when there is nothing to train on.

    New files go together. Files whose training failed are tried again with half of the company they had, until the one
    that makes trainings fail is alone; alone it is given up after TRIES_ALONE failures. After a failure new files go
    first, then failed and new ones take turns.

    Args:
        landed: oldest first.
        trainings: ended ones of one model, oldest first.
    """
    left = _left(landed, trainings)
    last_failure = {sha: training for training in trainings if training.outcome == "failed" for sha in training.hashes}
    new = [file for file in left if file.sha256 not in last_failure]
    failed = [file for file in left if file.sha256 in last_failure]
    if not failed:
        return new[:MAX_FILES]
    first = min((last_failure[file.sha256] for file in failed), key=trainings.index)
    since = trainings[trainings.index(first) + 1 :]
    if new and (not since or since[-1].again):
        return new[:MAX_FILES]
    company = [file for file in failed if last_failure[file.sha256] is first]
    return company[: max(1, len(first.files) // 2)]


def given_up(trainings: Sequence[Training]) -> set[str]:
    """Contents that are not tried any more."""
    alone = [training.files[0].sha256 for training in trainings
             if training.outcome == "failed" and len(training.files) == 1]
    return {sha for sha in alone if alone.count(sha) >= TRIES_ALONE}


def new_training(preset: str, model: str, files: Sequence[landing.Landed], trainings: Sequence[Training]) -> Training:
    """The record of a training on these files; the same ones tried again are another run."""
    content = "\n".join([preset, *sorted(file.sha256 for file in files)])
    name = f"retrain__{hashlib.sha256(content.encode()).hexdigest()[:12]}"
    tries = sum(training.run_id.startswith(f"{name}-") for training in trainings)
    seen = set().union(*(training.hashes for training in trainings))
    return Training(
        run_id=f"{name}-{tries + 1}", preset=preset, model=model, started_at=time.time(),
        files=[LandedFile(sha256=file.sha256, uri=file.uri) for file in files],
        again=all(file.sha256 in seen for file in files))


def read_trainings() -> list[Training]:
    """All trainings that `retrain` started, oldest first."""
    folder = _folder()
    found = [Training.model_validate_json(store.read_bytes(store.join(folder, name)))
             for name in store.list_files(folder) if name.endswith(".json")]
    return sorted(found, key=lambda training: (training.started_at, training.run_id))


def _decide(preset: str, trainings: Sequence[Training]) -> Training:
    # Checked here, where a wrong preset is said before a record is written.
    model = stages.resolve(_preset(preset), stages.Form(start_from="champion"), {}).registry.model
    trainings, landed = [training for training in trainings if training.model == model], landing.landed()
    files = next_files(landed, trainings)
    if not files:
        skip(f"nothing new for {model}: {_used(landed, trainings)}")
    return new_training(preset, model, files, trainings)


def _left(landed: Sequence[landing.Landed], trainings: Sequence[Training]) -> list[landing.Landed]:
    used = given_up(trainings).union(*(t.hashes for t in trainings if t.outcome == "candidate"))
    return [file for file in landed if file.sha256 not in used]


def _used(landed: Sequence[landing.Landed], trainings: Sequence[Training]) -> str:
    poison = given_up(trainings) - set().union(*(t.hashes for t in trainings if t.outcome == "candidate"))
    names = [file.source for file in landed if file.sha256 in poison]
    return f"{len(landed)} files have landed, {len(names)} of them were given up {', '.join(names[:20])}".rstrip()


def _override(training: Training) -> dict[str, Any]:
    """The preset's own training prompts and the landed files."""
    own = _preset(training.preset)["prepare"]["train"]["sources"]
    return {"prepare": {"train": {"sources": [
        *own, *({"kind": "file", "uri": file.uri} for file in training.files)]}}}


def _preset(name: str) -> dict[str, Any]:
    return pipeline.read_preset(deployment.presets(), name)


def _become(training: Training, outcome: str, candidate: str = "") -> Training:
    settled = training.model_copy(update={"outcome": outcome, "candidate": candidate})
    if settled != training:
        _write(settled)
    return settled


def _read(run_id: str) -> Training:
    return Training.model_validate_json(store.read_bytes(_where(run_id)))


def _write(training: Training) -> None:
    store.write_bytes(_where(training.run_id), training.model_dump_json(indent=1))


def _folder() -> str:
    return store.join(deployment.store(), "retrain")


def _where(run_id: str) -> str:
    return store.join(_folder(), f"{run_id}.json")
