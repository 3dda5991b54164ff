"""What an engine writes about itself, and when it stops."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import engine.job
from engine.job import Job
from engine.spec.job import ATTEMPT_FILE, ATTEMPT_VARIABLE, HEARTBEAT_FILE
from engine.spec.tracking import TrackingSpec
from engine.store import progress
from engine.tracking import Tracker

ROOT = Path(__file__).resolve().parents[2]


def beats(path, count=2):
    """Wait for so many different heartbeats; the last."""
    steps, deadline = set(), time.monotonic() + 20
    while len(steps) < count:
        assert time.monotonic() < deadline
        if path.exists():
            beat = json.loads(path.read_text())
            steps.add(beat["step"])
        time.sleep(0.01)
    return beat


def test_the_heartbeat_tells_how_often_the_work_moved(tmp_path, monkeypatch):
    monkeypatch.setattr(engine.job, "HEARTBEAT_S", 0.02)
    job = Job(tmp_path)
    job.start_heartbeat()
    assert beats(tmp_path / HEARTBEAT_FILE)["moves"] == 0
    job.move("generate")
    job.progress("train", 1, 2)
    assert beats(tmp_path / HEARTBEAT_FILE, 3)["moves"] == 2


def test_a_full_disk_does_not_end_the_heartbeat(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(engine.job, "HEARTBEAT_S", 0.02)
    write, failures = engine.job.write_atomic, iter(range(3))

    def full_at_first(path, content):
        if next(failures, None) is not None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, content)

    monkeypatch.setattr(engine.job, "write_atomic", full_at_first)
    Job(tmp_path).start_heartbeat()
    beats(tmp_path / HEARTBEAT_FILE)
    assert "No space left on device" in capfd.readouterr().err


@pytest.mark.parametrize(("newest", "code"), [("2", 3), ("1", 0)])
def test_an_attempt_that_was_replaced_ends_by_itself(tmp_path, newest, code):
    (tmp_path / ATTEMPT_FILE).write_text(newest)
    program = ("import time; from pathlib import Path; from engine.job import Job\n"
               f"Job(Path({str(tmp_path)!r})).start_heartbeat(); time.sleep(3)")
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=os.environ | {ATTEMPT_VARIABLE: "1"},
                           capture_output=True, text=True, timeout=60)
    assert ended.returncode == code, ended.stderr
    assert ("attempt 1 may not write any more, attempt 2 has taken over" in ended.stderr) == bool(code)


def test_neither_heartbeat_nor_metrics_wait_for_a_commit_that_takes_long(tmp_path, monkeypatch):
    """A store that does not answer keeps the commit of a checkpoint waiting for minutes."""
    monkeypatch.setattr(engine.job, "HEARTBEAT_S", 0.02)
    monkeypatch.setenv(ATTEMPT_VARIABLE, "1")
    (tmp_path / ATTEMPT_FILE).write_text("1\n")
    job, tracker = Job(tmp_path), Tracker(tmp_path, TrackingSpec())
    with job.fence.commit():
        job.start_heartbeat()
        beats(tmp_path / HEARTBEAT_FILE)
        logging = threading.Thread(target=tracker.log, args=(1, {"reward": 1.0}), daemon=True)
        logging.start()
        logging.join(20)
        assert not logging.is_alive()
    with open(tmp_path / ATTEMPT_FILE, "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        beats(tmp_path / HEARTBEAT_FILE, 3)


def test_a_transfer_of_the_store_is_a_move_of_the_job(tmp_path, monkeypatch):
    monkeypatch.setattr(engine.job, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(progress, "_watchers", [])
    job = Job(tmp_path)
    job.start_heartbeat()
    progress.moved(1 << 20)
    assert beats(tmp_path / HEARTBEAT_FILE, 3)["moves"] == 1


def test_a_line_of_the_log_is_one_write(tmp_path, monkeypatch):
    """Unbuffered (`python -u`), each write is a system call, and another thread's may come in between."""
    written = []
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=written.append, flush=lambda: None))
    Job(tmp_path).event("checkpoint", iteration=1)
    (line,) = written
    assert json.loads(line)["iteration"] == 1 and line.endswith("}\n")
