"""An attempt that was given up and comes back commits nothing."""

import fcntl

import pytest

from engine.errors import EXIT_FAULT, FaultError
from engine.fence import Fence, FencedError
from engine.job import Job
from engine.spec import RunResult
from engine.spec.tracking import TrackingSpec
from engine.tracking import Tracker
from tasks import jobs
from tasks.launchers import local
from tests.pipeline.tasks.test_jobs import ended, prepare_to


@pytest.fixture
def old_attempt(deployment, monkeypatch):
    """The engine's view of attempt 1, after attempt 2 has begun."""
    directory = deployment.home / "jobs" / "d" / "r" / "t"
    deployment.plan({"t": [{"exit": 3}, {}]})
    monkeypatch.setenv("RATCHET_ATTEMPT", "1")
    spec = prepare_to(deployment.home / "prompts")
    jobs.submit(directory, spec, local)
    assert ended(directory).exit_code == 3
    job = Job(directory)
    with job.fence.commit():
        pass
    jobs.submit(directory, spec, local)
    assert ended(directory) == jobs.JobState("done", attempt=2, exit_code=0)
    return job


def test_it_cannot_replace_the_result(old_attempt):
    result = (old_attempt.dir / "result.json").read_bytes()
    with pytest.raises(FencedError, match="attempt 1 may not write any more, attempt 2 has taken over"):
        old_attempt.result(RunResult(stage="prepare", outputs={"prompts": "/elsewhere"}))
    assert (old_attempt.dir / "result.json").read_bytes() == result
    assert FencedError.exit_code == EXIT_FAULT


def test_it_logs_no_metric_a_second_time(old_attempt):
    with pytest.raises(FencedError), Tracker(old_attempt.dir, TrackingSpec()) as tracker:
        tracker.log(1, {"reward": 1.0})
    assert not (old_attempt.dir / "metrics.jsonl").exists()


def test_its_wrapper_does_not_write_how_it_ended(deployment):
    directory = deployment.home / "jobs" / "d" / "r" / "t"
    deployment.plan({"t": [{"seconds": 0.5}]})
    jobs.submit(directory, prepare_to(deployment.home / "prompts"), local)
    jobs.hand_over(directory, 2)
    assert ended(directory) == jobs.JobState("lost", attempt=1)
    assert not (directory / "exit.json").exists()


def test_no_attempt_begins_in_the_middle_of_a_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "HAND_OVER_LIMIT_S", 0.2)
    jobs.hand_over(tmp_path, 1)
    with Fence(tmp_path, 1).commit(), pytest.raises(FaultError, match="an earlier attempt has held attempt for more"):
        jobs.hand_over(tmp_path, 2)
    jobs.hand_over(tmp_path, 2)
    with pytest.raises(FencedError), Fence(tmp_path, 1).commit():
        pass


def test_a_torn_number_lets_nobody_write(tmp_path):
    (tmp_path / "attempt").write_text("")
    with pytest.raises(FencedError, match="attempt unknown has taken over"), Fence(tmp_path, 1).commit():
        pass


def test_without_a_wrapper_nothing_is_fenced(tmp_path, monkeypatch):
    monkeypatch.delenv("RATCHET_ATTEMPT", raising=False)
    with Fence(tmp_path).commit():
        assert list(tmp_path.iterdir()) == []


def test_the_lock_ends_with_the_process_that_holds_it(tmp_path):
    jobs.hand_over(tmp_path, 1)
    with Fence(tmp_path, 1).commit(), open(tmp_path / "attempt") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with open(tmp_path / "attempt") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
