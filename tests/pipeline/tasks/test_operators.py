"""What a task does when a person stops it."""

import pytest
from airflow.sdk.exceptions import AirflowException

from tasks import jobs
from tasks.launchers import local
from tasks.operators import EngineOperator
from tests.pipeline.tasks.test_jobs import prepare_to, processes_of, started


def test_a_stop_that_came_just_before_the_job_was_started_ends_it_all_the_same(deployment):
    deployment.plan({"t": [{"seconds": 600}]})
    directory = deployment.home / "jobs" / "d" / "r" / "t"
    task = EngineOperator(task_id="t", spec=lambda context: prepare_to(deployment.home / "prompts"))
    task._directory, task._launcher, task._spec = directory, local, task.make_spec({})
    task.on_kill()  # there is nothing to end yet
    task.submit_job({"params": {}})
    started(directory)
    with pytest.raises(AirflowException, match="the task was stopped"):
        task.poll_until_complete(str(directory), {"params": {}})
    assert not processes_of(directory) and jobs.state_of(directory, local).exit_code == 130
