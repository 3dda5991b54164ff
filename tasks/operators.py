"""Airflow operators: run an engine job, register its model, decide whether to go on, and what shows where a run is."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn

from airflow.providers.standard.operators.python import PythonOperator
from airflow.sdk import BaseOperator, ResumableJobMixin, SkipMixin
from airflow.sdk.definitions.context import Context
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowRescheduleException,
    AirflowSkipException,
    AirflowTaskTimeout,
)

from engine.errors import EXIT_NUMERICS, EXIT_REFUSED, FaultError, RefusedError
from engine.spec import RunResult, RunSpec
from engine.spec.job import FOLLOWED_FILE, LOG_FILE
from tasks import deployment, jobs, launchers, links, openlineage, runs, tracking
from tasks.joblog import LogFollower, readable
from tasks.stages import Decision

RETRIES = {"retries": 25, "retry_delay": timedelta(seconds=5), "retry_exponential_backoff": 2.0,
           "max_retry_delay": timedelta(minutes=2)}
"""How the tasks of all DAGs are tried again: over about 40 minutes, longer from one to the next up to two minutes.

Airflow counts the deaths of tasks and schedulers too and never forgets one: a stage of a day that met eight of them
must not wait long for its next try."""
POLL_S = 0.5
NO_SLOT_PAUSE = timedelta(seconds=60)
"""Before a task whose job found no free slot asks for its place in the pool again."""
REATTACH_LINES = 30
"""Lines of the past that a task shows when it takes over a running job."""

NEVER_RETRIED = {EXIT_REFUSED: "refused", EXIT_NUMERICS: "numerics"}


@contextlib.contextmanager
def airflow_errors() -> Iterator[None]:
    """Ratchet's errors as Airflow's: what a person must mend is not retried, what a retry can mend is."""
    try:
        yield
    except (RefusedError, FaultError) as error:
        kind = AirflowFailException if error.exit_code in NEVER_RETRIED else AirflowException
        raise kind(f"{type(error).__name__}: {error}") from None


def skip(reason: str) -> NoReturn:
    """End a task as skipped; its log says why in a line of its own, as a person reads it."""
    logging.getLogger(__name__).info("Skipped: %s", reason)
    raise AirflowSkipException(reason)


class EngineOperator(ResumableJobMixin, BaseOperator):
    """Run one engine job: submit it or take over the one that is there, show its log, return its result.

    The job's directory depends on the DAG run and the task only, so a try that starts after a crash finds the job of
    the try before it, whether that was recorded or not.
    """

    external_id_key = "engine_job"
    operator_extra_links = links.LINKS

    def __init__(self, *, spec: Callable[[Context], RunSpec], **kwargs: Any):
        """Args: spec: makes the job's spec when the task runs."""
        super().__init__(**kwargs)
        self.make_spec = spec
        self._stopping: threading.Thread | None = None
        """Since Airflow has sent SIGTERM: what decides about the engine."""

    def execute(self, context: Context) -> dict[str, Any]:
        """Returns: `RunResult` as a dictionary: URIs and a few numbers."""
        with airflow_errors():
            self._launcher = launchers.configured()
            self._spec = self.make_spec(context)
            ti = context["ti"]
            links.show(context, (links.JOB_LOG, links.job_log(ti.dag_id, ti.run_id, ti.task_id)))
            self._directory = jobs.job_directory(
                deployment.home(), ti.dag_id, ti.run_id, ti.task_id, ti.map_index if ti.map_index is not None else -1)
            self.log.info("Job directory: %s", self._directory)
            self._ids = {"dag_id": ti.dag_id, "run_id": ti.run_id, "task_id": ti.task_id}
            jobs.note_task(self._directory, **self._ids)
            try:
                return self.execute_resumable(context)
            except AirflowTaskTimeout:
                jobs.kill(self._directory, self._launcher)
                raise

    def submit_job(self, context: Context) -> str:
        """Start the job, or adopt it."""
        force = bool(context["params"].get("force", False))
        submission = jobs.submit(self._directory, self._spec, self._launcher, force=force)
        state = submission.state
        self.log.info("%s attempt %d (%s)", "Adopted" if submission.adopted else "Started", state.attempt, state.phase)
        self._adopted = submission.adopted
        return str(self._directory)

    def get_job_status(self, external_id: Any, context: Context) -> str:
        """The phase of the job; `changed` when its directory is for another spec than this task's now."""
        self._adopted = True
        if external_id != str(self._directory) or jobs.spec_changes(self._directory, self._spec):
            return "changed"
        return jobs.state_of(self._directory, self._launcher).phase

    def is_job_active(self, status: str) -> bool:
        """Whether there is something to wait for."""
        return status == "running"

    def is_job_succeeded(self, status: str) -> bool:
        """Whether the result is there."""
        return status == "done"

    def poll_until_complete(self, external_id: Any, context: Context) -> dict[str, Any]:
        """Show the log until the job has ended; its result.

        An attempt that was broken off by a fault but got further than those before it is followed by the next one at
        once: a job may be killed any number of times, and only faults without progress use up Airflow's retries.

        Raises:
            AirflowFailException: exit 2 or 4, never retried. AirflowException: any other end but 0.
            AirflowRescheduleException: other jobs hold the GPUs; no try is used up.
        """
        while True:
            state, lines = self._follow()
            if state.phase == "done":
                return self.get_job_result(external_id, context)
            if state.phase == "lost":
                self._launcher.kill(self._directory)  # nobody watches what is left of it
            if not state.leased:
                self.log.info("Other jobs hold the slots of this machine; the place in the pool is free for them")
                raise AirflowRescheduleException(datetime.now(UTC) + NO_SLOT_PAUSE)
            failure = self._failure(state, lines)
            if isinstance(failure, AirflowFailException) or not jobs.got_further(self._directory):
                raise failure
            self.log.warning("%s; it got further than the attempt before, so the next one begins", failure)
            self.submit_job(context)

    def _follow(self) -> tuple[jobs.JobState, list[str]]:
        """Show the log of the running attempt; how it ended, and its last lines."""
        follower = LogFollower(self._directory / LOG_FILE, last_lines=REATTACH_LINES if self._adopted else None)
        while True:
            state = jobs.state_of(self._directory, self._launcher)
            ended = state.phase != "running"
            lines = follower.lines(final=ended)
            for line in lines:
                self.log.info("%s", readable(line))
            (self._directory / FOLLOWED_FILE).touch()
            if self._stopping is not None:
                self._stopping.join()
                # Once more: the signal may have come just before the job was started.
                raise AirflowException(f"the task was stopped; its engine job {self._end_or_leave()}")
            if ended:
                return state, lines
            time.sleep(POLL_S)

    def get_job_result(self, external_id: Any, context: Context) -> dict[str, Any]:
        """The result of a finished job, when MLflow has what it measured.

        Raises:
            FaultError: MLflow does not answer; the next try only sends what is left.
        """
        tracking.send_left(self._directory, getattr(self._spec, "tracking", None))
        result = jobs.read_result(self._directory)
        assert isinstance(result, RunResult), f"{self._directory}: done without a result"
        return result.model_dump()

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> Any:
        """What the job read and wrote; Airflow's OpenLineage provider asks, where it is installed."""
        result = jobs.read_result(self._directory)
        if result is None:
            return None
        return openlineage.lineage(openlineage.job_inputs(self._spec, result), openlineage.job_outputs(result))

    def on_kill(self) -> None:
        """SIGTERM has come: end the engine, unless Airflow still wants this try.

        In a thread: the main one may be in the middle of a request. Airflow goes on with `execute` afterwards and kills
        this process 5 s later.
        """
        if hasattr(self, "_ids") and self._stopping is None:
            self._stopping = threading.Thread(target=self._end_or_leave, name="stop", daemon=True)
            self._stopping.start()

    def _end_or_leave(self) -> str:
        """What became of the engine.

        A person who fails or clears a task has changed its state before the signal comes. Where the task is still
        `running`, or nobody can say, a worker is going down or the API server is away: the next try takes over.
        """
        from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

        try:
            states = RuntimeTaskInstance.get_task_states(
                self._ids["dag_id"], task_ids=[self._ids["task_id"]], run_ids=[self._ids["run_id"]])
        except Exception as error:  # noqa: BLE001
            return f"goes on: Airflow does not say what became of the task ({type(error).__name__})"
        if states.get(self._ids["run_id"], {}).get(self._ids["task_id"]) == "running":
            return "goes on: Airflow wants it, the next try takes it over"
        jobs.kill(self._directory, self._launcher)
        return "has been ended"

    def _failure(self, state: jobs.JobState, lines: list[str]) -> AirflowException:
        said = next((line for line in reversed(lines) if line.startswith("error:")), "")
        if state.phase == "lost":
            how = "its processes are gone and left no exit code"
        elif state.signal:
            how = f"it was ended by signal {state.signal}"
        else:
            how = f"exit code {state.exit_code}"
        message = f"{self._spec.stage} attempt {state.attempt}: {how}; {said or f'see {self._directory / LOG_FILE}'}"
        if state.signal is None and state.exit_code in NEVER_RETRIED:
            return AirflowFailException(f"{message} ({NEVER_RETRIED[state.exit_code]}: not retried)")
        return AirflowException(message)


class StepOperator(PythonOperator):
    """A Python task that shows where its run is to be found."""

    operator_extra_links = (links.MLFLOW, links.REPORT)


class RegisterOperator(StepOperator):
    """Run `training.register`, and say to OpenLineage which files the version is made of."""

    def execute(self, context: Context) -> dict[str, Any]:
        """Returns: what the callable does."""
        self._made = super().execute(context)
        return self._made

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> Any:
        """The export in, the registered version out; Airflow's OpenLineage provider asks, where it is installed."""
        made = runs.read_candidate(self._made["run_uri"])
        version = openlineage.Place(tracking.version_uri(made.model, made.version), made.weights_hash)
        return openlineage.lineage([openlineage.Place(made.export_uri, made.weights_hash)], [version])


class GoOnOperator(BaseOperator, SkipMixin):
    """Let the tasks after it run, or skip at once all those that would be skipped one after the other."""

    inherits_from_skipmixin = True
    operator_extra_links = (links.MLFLOW, links.REPORT)

    def __init__(self, *, decide: Callable[[Context], Decision], **kwargs: Any):
        """Args: decide: says whether to go on, and why."""
        super().__init__(**kwargs)
        self.decide = decide

    def execute(self, context: Context) -> str:
        """Returns: the reason; it is kept before the tasks are skipped."""
        with airflow_errors():
            decision = self.decide(context)
        self.log.info("%s: %s", "Going on" if decision.go_on else "Stopping", decision.reason)
        if not decision.go_on:
            context["ti"].xcom_push(key="return_value", value=decision.reason)
            self.skip(ti=context["ti"], tasks=self.dependants())
        return decision.reason

    def dependants(self) -> list[Any]:
        """Tasks that need this one, up to those whose trigger rule accepts skipped tasks."""
        found: dict[str, Any] = {}
        queue = list(self.downstream_list)
        while queue:
            task = queue.pop()
            if task.task_id not in found and task.trigger_rule == "all_success":
                found[task.task_id] = task
                queue.extend(task.downstream_list)
        return list(found.values())
