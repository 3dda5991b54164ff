"""An engine that hangs is ended and its job fails with exit 3; one that only works for long is not."""

import json
import signal
import time

import pytest

from engine.spec import parse_spec
from engine.spec.job import FOLLOWED_FILE
from tasks import jobs
from tasks.launchers import local
from tasks.launchers.deadman import DeadMan
from tests.pipeline.examples import train_section
from tests.pipeline.tasks.test_jobs import ended, prepare_to, processes_of, wait_for


def looks(path, beats, **limits):
    """What a `DeadMan` says after each heartbeat of a list; None stands for one that cannot be read."""
    deadman = DeadMan(path, **{"heartbeat_limit_s": 3, "first_limit_s": 6, "stall_limit_s": 8, **limits})
    verdicts = []
    for beat in beats:
        path.write_text("{torn" if beat is None else json.dumps(beat))
        verdicts.append(deadman.look())
    return verdicts


def test_an_engine_that_beats_and_moves_is_never_late(tmp_path):
    assert not any(looks(tmp_path / "heartbeat", [{"step": i, "moves": i // 7} for i in range(100)]))


def test_a_silent_engine_is_late_after_its_limit_and_not_before(tmp_path):
    verdicts = looks(tmp_path / "heartbeat", [{"step": 1, "moves": 1}] * 5)
    assert verdicts[:4] == [None] * 4
    assert verdicts[4] == "no heartbeat for 4 s (limit 3 s)"


def test_one_that_beats_without_progress_is_late_after_the_stall_limit(tmp_path):
    beats = [{"step": i, "moves": 3} for i in range(11)]
    verdicts = looks(tmp_path / "heartbeat", beats)
    assert verdicts[:9] == [None] * 9 and "no progress for 9 s although the process lives" in verdicts[9]
    assert not any(looks(tmp_path / "heartbeat", beats, stall_limit_s=12))


def test_the_first_heartbeat_may_take_longer_and_a_torn_one_counts_as_none(tmp_path):
    deadman = DeadMan(tmp_path / "heartbeat", heartbeat_limit_s=3, first_limit_s=6, stall_limit_s=8)
    assert [deadman.look() for _ in range(7)] == [None] * 6 + ["no heartbeat for 7 s (limit 6 s)"]
    assert looks(tmp_path / "heartbeat", [{"step": 1, "moves": 1}] + [None] * 4)[-1]


def test_no_clock_is_read_so_a_machine_that_stood_still_ends_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: -1e9)
    monkeypatch.setattr(time, "monotonic", lambda: 1e12)
    assert looks(tmp_path / "heartbeat", [{"step": 1, "moves": 1}] * 3) == [None] * 3


def train_to(home):
    return parse_spec({"stage": "train", "model": "/m", "prompts": "/p", "checkpoint_dir": str(home / "c"),
                       "export_dir": str(home / "e"), **train_section(), "stall_limit_s": 60})


def impatient(monkeypatch):
    """Real wrapper; its limits are 120 times as short."""
    start = local.subprocess.Popen

    def popen(command, **kwargs):
        config = json.loads(command[-1])
        limits = config["limits"]
        config["limits"] = {name: value and value / 120 for name, value in limits.items()} | {"tick_s": 0.1}
        return start([*command[:-1], json.dumps(config)], **kwargs)

    monkeypatch.setattr(local.subprocess, "Popen", popen)


@pytest.mark.parametrize(("stage", "behaviour", "said"), [
    ("prepare", {"beats": 1, "moves": 1, "seconds": 600, "ignore_sigterm": True, "children": 2}, "no heartbeat for"),
    ("train", {"beats": 60, "moves": 1}, "no progress for"),
    ("prepare", {"beats": 60, "moves": 1}, "no progress for"),
])
def test_a_hung_engine_is_ended_with_all_its_processes_and_tried_again(deployment, monkeypatch, stage, behaviour, said):
    impatient(monkeypatch)
    monkeypatch.setitem(jobs.STALL_LIMITS_S, "prepare", 60 if "progress" in said else 3600)
    directory = deployment.home / "jobs" / "d" / "r" / "t"
    deployment.plan({"t": [behaviour, {}]})
    spec = train_to(deployment.home) if stage == "train" else prepare_to(deployment.home / "prompts")
    jobs.submit(directory, spec, local)
    assert ended(directory) == jobs.JobState("failed", attempt=1, exit_code=3)
    log = (directory / "log.txt").read_text()
    assert f"error: the engine hung and was ended: {said}" in log.splitlines()[-1]
    assert "(most recent call first)" in log and "fake_engine.py" in log  # where it hung
    wait_for(lambda: not processes_of(directory), 5)  # the wrapper ends a moment after it wrote how the engine did
    jobs.submit(directory, spec, local)
    assert ended(directory) == jobs.JobState("done", attempt=2, exit_code=0)


def test_a_phase_longer_than_the_heartbeat_limit_is_no_hang_while_it_beats(deployment, monkeypatch):
    """What a long compilation looks like: the main thread does not move, the heartbeat thread does."""
    impatient(monkeypatch)
    directory = deployment.home / "jobs" / "d" / "r" / "t"
    deployment.plan({"t": [{"beats": 4, "moves": 0}]})
    jobs.submit(directory, prepare_to(deployment.home / "prompts"), local)
    assert ended(directory).phase == "done"


@pytest.mark.parametrize("followed", [True, False])
def test_a_job_that_no_task_follows_any_more_is_ended(deployment, monkeypatch, followed):
    """A person ended the run between two tries: nobody else would end the engine, nor free its slot."""
    impatient(monkeypatch)
    monkeypatch.setattr(local, "FOLLOWED_LIMIT_S", 120.0)
    directory = deployment.home / "jobs" / "d" / "r" / "t"
    deployment.plan({"t": [{"beats": 4, "moves": 4}]})
    jobs.submit(directory, prepare_to(deployment.home / "prompts"), local)
    while followed and jobs.state_of(directory, local).phase == "running":
        (directory / FOLLOWED_FILE).touch()
        time.sleep(0.1)
    assert ended(directory).exit_code == (0 if followed else 3)
    assert ("the engine was ended: no task has followed it for" in (directory / "log.txt").read_text()) != followed
    wait_for(lambda: not processes_of(directory), 5)


def test_a_stopped_engine_is_ended_too(deployment, monkeypatch):
    impatient(monkeypatch)
    directory = deployment.home / "jobs" / "d" / "r" / "t"
    deployment.plan({"t": [{"beats": 1, "signal": signal.SIGSTOP}]})
    jobs.submit(directory, prepare_to(deployment.home / "prompts"), local)
    assert ended(directory) == jobs.JobState("failed", attempt=1, exit_code=3)
    wait_for(lambda: not processes_of(directory), 5)  # the wrapper ends a moment after it wrote how the engine did
