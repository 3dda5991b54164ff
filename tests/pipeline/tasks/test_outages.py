"""Parts of the stack are away for a while, or there twice: the run goes on, and nothing runs twice."""

import json
import os
import signal

import pytest

from engine.errors import FaultError
from tasks import stack
from tasks.launchers import local
from tasks.launchers.processes import send
from tests.pipeline.chaos.outage import away, patience_s


def test_a_task_lives_through_four_minutes_without_an_api_server():
    assert min(patience_s()) >= 240


def started(airflow, run_id, task_id="stage_1.train"):
    airflow.wait((airflow.job(run_id, task_id) / "started").exists)
    return airflow.job(run_id, task_id)


@pytest.mark.slow
def test_an_outage_of_the_api_server_longer_than_three_heartbeats_disturbs_no_task(airflow):
    # It ends in the middle: the task has to keep its result until somebody takes it.
    airflow.plan({"away/stage_1.train": [{"seconds": 10}]})
    run = airflow.api.trigger("train_ppo", {"preset": "tiny", "stages": 1}, "away")
    started(airflow, run)
    with away(airflow, "api-server", seconds=35):
        pass
    assert airflow.finished(run)["register"] == "success"
    assert airflow.api.tasks("train_ppo", run)["stage_1.train"]["try_number"] == 1
    assert set(airflow.attempts(run).values()) == {1}


@pytest.mark.slow
def test_everything_but_the_engine_dies_in_mid_training_and_nothing_trains_twice(airflow):
    airflow.plan({"reborn/stage_1.train": [{"seconds": 45}]})
    run = airflow.api.trigger("train_ppo", {"preset": "tiny", "stages": 1}, "reborn")
    directory = started(airflow, run)
    engine = local.mark_of(directory).processes()
    doomed = airflow.stack.processes()
    assert engine and not engine & doomed
    for pid in doomed:
        os.kill(pid, signal.SIGKILL)
    airflow.wait(lambda: stack.answers(f"{airflow.stack.airflow_url}/api/v2/version"))
    assert engine <= local.mark_of(directory).processes(), "the engine goes on"
    assert airflow.finished(run)["register"] == "success"
    tasks = airflow.api.tasks("train_ppo", run)
    assert tasks["stage_1.train"]["try_number"] == 2 < tasks["stage_1.train"]["max_tries"]
    assert set(airflow.attempts(run).values()) == {1}
    # What the dead scheduler had started is gone too: its workers would give tasks a second life.
    assert not {pid for pid in doomed if os.path.exists(f"/proc/{pid}")}


@pytest.mark.slow
def test_a_scheduler_that_is_restarted_by_sigterm_ends_no_engine(airflow):
    """As systemd does it: every process of the service gets the signal, tasks included."""
    airflow.plan({"deploy/stage_1.train": [{"seconds": 40}]})
    run = airflow.api.trigger("train_ppo", {"preset": "tiny", "stages": 1}, "deploy")
    directory = started(airflow, run)
    engine = local.mark_of(directory).processes()
    send(airflow.stack._mark("scheduler").processes(), signal.SIGTERM)
    airflow.wait(lambda: "its engine job goes on" in airflow.api.log("train_ppo", run, "stage_1.train"))
    assert engine and engine <= local.mark_of(directory).processes()
    assert airflow.finished(run)["register"] == "success"
    assert set(airflow.attempts(run).values()) == {1}


@pytest.mark.slow
def test_a_second_run_of_the_same_name_is_refused_and_changes_nothing(airflow):
    airflow.plan({})
    run = airflow.api.trigger("train_ppo", {"preset": "tiny", "stages": 1}, "only-once")
    airflow.finished(run)
    results = {path: path.read_bytes() for path in airflow.job(run, "prepare").parent.glob("*/result.json")}
    with pytest.raises(FaultError, match="409"):
        airflow.api.trigger("train_ppo", {"preset": "tiny", "stages": 2}, "only-once")
    assert results and all(path.read_bytes() == content for path, content in results.items())
    assert json.loads((airflow.job(run, "prepare") / "job.json").read_text())["attempt"] == 1


@pytest.mark.slow
def test_a_second_scheduler_makes_no_job_run_twice(airflow):
    """SQLite has no row locks, so Airflow may give out a task twice; the job that it stands for is there once."""
    with airflow.second_scheduler():
        airflow.plan({})
        run = airflow.api.trigger("train_ppo", {"preset": "tiny"}, "two-schedulers")
        assert airflow.finished(run)["register"] == "success"
        assert set(airflow.attempts(run).values()) == {1}
