"""What a task does when Airflow stops it, and when its job found no place."""

import json
import os
import signal
from types import SimpleNamespace

import pytest
from airflow.sdk.exceptions import AirflowException, AirflowRescheduleException, AirflowTaskTimeout
from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

from tasks import jobs, links
from tasks.launchers import local
from tasks.operators import EngineOperator
from tests.pipeline.tasks.test_jobs import prepare_to, processes_of, started, wait_for

CONTEXT = {"params": {}, "ti": SimpleNamespace(dag_id="d", run_id="r", task_id="t", map_index=-1, stats_tags={})}


@pytest.fixture
def task(deployment, monkeypatch):
    """A task whose job would run for ten minutes."""
    deployment.plan({"t": [{"seconds": 600, "ignore_sigterm": True}]})
    monkeypatch.setattr(links, "show", lambda *_: None)
    monkeypatch.setenv("RATCHET_HOME", str(deployment.home))
    made = EngineOperator(task_id="t", spec=lambda context: prepare_to(deployment.home / "prompts"))
    made._directory, made._launcher, made._spec = deployment.home / "jobs" / "d" / "r" / "t", local, made.make_spec({})
    made._ids = {"dag_id": "d", "run_id": "r", "task_id": "t"}
    return made


def airflow_says(monkeypatch, state):
    def answer(dag_id, *, task_ids, run_ids):
        if state is None:
            raise ConnectionError("the API server is away")
        return {run_ids[0]: {task_ids[0]: state}}

    monkeypatch.setattr(RuntimeTaskInstance, "get_task_states", staticmethod(answer))


@pytest.mark.parametrize("state", ["failed", "restarting", "skipped"])
def test_a_stop_that_came_just_before_the_job_was_started_ends_it_all_the_same(task, monkeypatch, state):
    airflow_says(monkeypatch, state)
    task.on_kill()  # there is nothing to end yet
    task.submit_job({"params": {}})
    started(task._directory)
    with pytest.raises(AirflowException, match="the task was stopped; its engine job has been ended"):
        task.poll_until_complete(str(task._directory), {"params": {}})
    assert not processes_of(task._directory) and jobs.state_of(task._directory, local).exit_code == 130


@pytest.mark.parametrize("state", ["running", None])
def test_a_stop_that_nobody_asked_for_leaves_the_engine_to_the_next_try(task, monkeypatch, state):
    """A worker that is restarted, or five minutes without an API server."""
    airflow_says(monkeypatch, state)
    task.submit_job({"params": {}})
    started(task._directory)
    before = processes_of(task._directory)
    task.on_kill()
    with pytest.raises(AirflowException, match="its engine job goes on"):
        task.poll_until_complete(str(task._directory), {"params": {}})
    assert processes_of(task._directory) == before and jobs.state_of(task._directory, local).phase == "running"


def test_a_task_whose_own_time_is_over_ends_its_engine(task, monkeypatch):
    """Airflow knows such a task as running."""
    airflow_says(monkeypatch, "running")

    def too_long():
        started(task._directory)
        raise AirflowTaskTimeout

    monkeypatch.setattr(task, "_follow", too_long)
    with pytest.raises(AirflowTaskTimeout):
        task.execute(CONTEXT)
    assert not processes_of(task._directory) and jobs.state_of(task._directory, local).exit_code == 130


def test_a_job_without_a_slot_gives_its_place_in_the_pool_back_and_uses_up_no_try(task, deployment, monkeypatch):
    monkeypatch.setattr(local, "LEASE_LIMIT_S", 1.0)
    monkeypatch.setattr(local, "WITHOUT_SLOT", ())
    other = deployment.home / "jobs" / "d" / "other" / "t"
    jobs.submit(other, task._spec, local)
    started(other)
    task.submit_job({"params": {}})
    with pytest.raises(AirflowRescheduleException):
        task.poll_until_complete(str(task._directory), {"params": {}})
    assert jobs.state_of(task._directory, local) == jobs.JobState("failed", 1, 3, None, leased=False)
    assert jobs.state_of(other, local).phase == "running"
    jobs.kill(other, local)
    task.submit_job({"params": {}})
    started(task._directory)


def test_nothing_of_a_job_runs_on_when_its_wrapper_was_killed(task):
    """Its lease is free then: another job may begin."""
    task.submit_job({"params": {}})
    started(task._directory)
    os.kill(json.loads((task._directory / "job.json").read_text())["pid"], signal.SIGKILL)
    wait_for(lambda: not processes_of(task._directory), 2)
    assert jobs.state_of(task._directory, local).phase == "lost"


def test_what_is_left_of_a_lost_job_is_ended_before_the_next_try(task, deployment):
    deployment.plan({"t": [{"seconds": 600, "ignore_sigterm": True, "children": 2}]})
    task.submit_job({"params": {}})
    started(task._directory)
    os.kill(json.loads((task._directory / "job.json").read_text())["pid"], signal.SIGKILL)
    wait_for(lambda: len(processes_of(task._directory)) == 2)  # in sessions of their own
    with pytest.raises(AirflowException, match="left no exit code"):
        task.poll_until_complete(str(task._directory), {"params": {}})
    assert not processes_of(task._directory)
