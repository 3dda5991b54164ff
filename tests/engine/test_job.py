"""What an engine writes about itself, and when it stops."""

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import engine.job
from engine.job import Job
from engine.spec.job import ATTEMPT_FILE, ATTEMPT_VARIABLE, HEARTBEAT_FILE

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
