"""The tracker: the file is whole whatever happens, and MLflow gets everything, in order, once."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mlflow.utils.validation import _validate_metric_name

from engine.spec import TrackingSpec
from engine.spec.job import METRICS_FILE, SENT_FILE
from engine.spec.tracking import clean_metric_name
from engine.tracking import DatasetInput, Tracker, read_metrics
from tests.mlflow_server import Forwarder, free_port

OFF = TrackingSpec()


@pytest.fixture
def run_id(client):
    return client.create_run("0").info.run_id


def _steps(client, run_id, name="reward/mean"):
    return [(m.step, m.value) for m in client.get_metric_history(run_id, name)]


@given(st.text(max_size=300))
@example("timing(s)/gen")
@example("mean@1")
@example("")
@example("/absolute")
@example("a//b")
@example("a/../b")
@example(".")
@example("x" * 251)
@example("ü")
@example("\ud800")
def test_every_cleaned_name_is_accepted_by_mlflow(name):
    cleaned = clean_metric_name(name)
    _validate_metric_name(cleaned)
    assert 0 < len(cleaned) <= 250
    assert clean_metric_name(cleaned) == cleaned


@given(st.text("a()[]@_/. ", max_size=12), st.text("a()[]@_/. ", max_size=12))
@example("timing(s)", "timing[s]")
@example("mean@1", "mean_1")
@example("a//b", "a/b")
@example("x" * 251, "x" * 252)
def test_different_names_stay_different(first, second):
    assert (clean_metric_name(first) == clean_metric_name(second)) == (first == second)


def test_a_good_name_stays_as_it_is():
    for name in ("reward/mean", "time/update_actor", "task/chain_sum/pass_at_1", "a b:c-d.e"):
        assert clean_metric_name(name) == name


def test_without_a_server_the_file_holds_every_step(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with Tracker(tmp_path, TrackingSpec(run_id="some")) as tracker:
        for step in range(3):
            tracker.log(step, {"reward/mean": step / 2, "odd (name)": math.nan})
        tracker.log_params({"lr": 0.1})
    rows = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert [(step, values["reward/mean"]) for step, _, values in rows] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert math.isnan(rows[0][2]["odd (name)"])
    assert not (tmp_path / SENT_FILE).exists()


def test_a_resumed_stage_writes_no_step_twice(tmp_path):
    first = Tracker(tmp_path, OFF)
    for step in range(5):
        first.log(step, {"x": step})
    resumed = Tracker(tmp_path, OFF)  # from the checkpoint of step 2: 3 and 4 are computed again
    for step in range(3, 8):
        resumed.log(step, {"x": step})
    assert [step for step, _, _ in read_metrics(tmp_path / "metrics.jsonl")] == list(range(8))


def test_a_step_is_on_the_disk_when_its_iteration_goes_on(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_size))
    with Tracker(tmp_path, OFF) as tracker:
        tracker.log(1, {"reward": 1.0})
        assert synced == [(tmp_path / "metrics.jsonl").stat().st_size]


def test_a_line_torn_by_a_kill_is_dropped_and_its_step_written_again(tmp_path):
    first = Tracker(tmp_path, OFF)
    first.log(0, {"x": 0})
    first.log(1, {"x": 1})
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    second_line = whole.index(b"\n") + 1
    for cut in (second_line, second_line + 1, second_line + 20, len(whole) - 1):
        path.write_bytes(whole[:cut])
        Tracker(tmp_path, OFF).log(1, {"x": 10})
        assert [(s, v["x"]) for s, _, v in read_metrics(path)] == [(0, 0), (1, 10)]


def test_everything_reaches_the_run(tmp_path, client, run_id):
    report = tmp_path / "report.html"
    report.write_text("<p>report</p>")
    with Tracker(tmp_path, TrackingSpec(run_id=run_id)) as tracker:
        tracker.log_params({"lr": 1e-5, "odd (name)": "x" * 10_000})
        tracker.set_tags({"weights.base": "abc"})
        tracker.log_input(DatasetInput("sums", "f" * 64, "s3://bucket/prompts"))
        for step in range(4):
            tracker.log(step, {"reward/mean": step, "timing(s)": 1.0, "loss": math.nan, "worst": math.inf})
        tracker.log_artifact(report, "report")
    run = client.get_run(run_id)
    assert _steps(client, run_id) == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)]
    assert len(_steps(client, run_id, clean_metric_name("timing(s)"))) == 4
    assert run.data.params["lr"] == "1e-05" and run.data.tags["weights.base"] == "abc"
    assert run.inputs.dataset_inputs[0].dataset.name == "sums"
    assert json.loads(run.inputs.dataset_inputs[0].dataset.source) == {"uri": "s3://bucket/prompts"}
    assert [f.path for f in client.list_artifacts(run_id, "report")] == ["report/report.html"]


def test_more_metrics_than_one_request_takes_are_divided(tmp_path, client, run_id):
    with Tracker(tmp_path, TrackingSpec(run_id=run_id)) as tracker:
        tracker.log(0, {f"m/{i}": i for i in range(2300)})
        tracker.log(1, {"m/0": 1})
    assert len(client.get_run(run_id).data.metrics) == 2300
    assert _steps(client, run_id, "m/0") == [(0, 0.0), (1, 1.0)]


def test_what_was_sent_but_not_noted_is_not_counted_twice(tmp_path, client, run_id):
    spec = TrackingSpec(run_id=run_id)
    with Tracker(tmp_path, spec) as tracker:
        for step in range(5):
            tracker.log(step, {"reward/mean": step, "bad": math.nan})
        tracker.log_params({"lr": 1})
    (tmp_path / SENT_FILE).unlink()  # killed between the server's answer and the note
    with Tracker(tmp_path, spec) as tracker:
        tracker.log(5, {"reward/mean": 5, "bad": math.nan})
    assert _steps(client, run_id) == [(s, float(s)) for s in range(6)]
    assert len(client.get_metric_history(run_id, "bad")) == 6


def test_a_clock_that_jumps_back_neither_loses_nor_reorders_a_step(tmp_path, client, run_id, monkeypatch):
    """Steps say what came after what; the clock only says when."""
    spec, hours = TrackingSpec(run_id=run_id), iter([20.0, 21.0, 3.0, 4.0, 1.0, 2.0])
    monkeypatch.setattr("engine.tracking.time", SimpleNamespace(time=lambda: 1e9 + 3600 * next(hours)))
    for attempt in range(3):
        with Tracker(tmp_path, spec) as tracker:
            for step in range(2 * attempt + 2):  # every attempt begins anew
                tracker.log(step, {"reward/mean": step})
    assert sorted(_steps(client, run_id)) == [(s, float(s)) for s in range(6)]
    assert client.get_run(run_id).data.metrics["reward/mean"] == 5.0
    assert [step for step, _, _ in read_metrics(tmp_path / METRICS_FILE)] == list(range(6))


def test_a_refused_message_does_not_stop_the_others(tmp_path, client, run_id, caplog):
    spec = TrackingSpec(run_id=run_id)
    with Tracker(tmp_path, spec) as tracker:
        tracker.log_params({"lr": 1})
        tracker.log_params({"lr": 2})  # MLflow keeps the first value of a parameter
        tracker.log_artifact(tmp_path / "not there")
        tracker.log_params({"after": "yes"})
        tracker.log(0, {"reward/mean": 0})
    run = client.get_run(run_id)
    assert run.data.params == {"lr": "1", "after": "yes"} and _steps(client, run_id) == [(0, 0.0)]
    assert "refused params" in caplog.text and "refused artifact" in caplog.text


def test_a_deleted_run_ends_the_sending_not_the_training(tmp_path, client, caplog):
    with Tracker(tmp_path, TrackingSpec(run_id="0" * 32)) as tracker:
        tracker.log(0, {"reward/mean": 0})
        tracker.log(1, {"reward/mean": 1})
        assert tracker.close()
    assert "refused step 1" in caplog.text
    assert len(list(read_metrics(tmp_path / "metrics.jsonl"))) == 2


def test_while_the_server_is_away_training_goes_on_and_everything_arrives_later_in_order_and_once(
        tmp_path, server, client, run_id, monkeypatch):
    road = Forwarder(server.port)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", road.uri)
    spec = TrackingSpec(run_id=run_id)
    tracker = Tracker(tmp_path, spec)  # the server is away from the start
    for step in range(3):
        tracker.log(step, {"reward/mean": step})
    road.join()
    _wait_until(lambda: len(_steps(client, run_id)) == 3)
    road.cut()  # and goes again in mid-training
    for step in range(3, 8):
        tracker.log(step, {"reward/mean": step})
    assert not tracker.close(deadline_s=1.0)  # the stage ends, still no server
    assert [step for step, _, _ in read_metrics(tmp_path / "metrics.jsonl")] == list(range(8))
    assert len(_steps(client, run_id)) == 3

    with Tracker(tmp_path, spec) as resumed:  # the next attempt
        resumed.log(8, {"reward/mean": 8})
        road.join()
        resumed.log(9, {"reward/mean": 9})
        assert resumed.close(deadline_s=60)
    road.cut()
    history = client.get_metric_history(run_id, "reward/mean")
    assert [(m.step, m.value) for m in history] == [(step, float(step)) for step in range(10)]
    assert [m.timestamp for m in history] == sorted(m.timestamp for m in history)


def _wait_until(done, limit_s=30.0):
    deadline = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


KILLED_STAGE = """
import os, sys, pathlib
from engine.spec import TrackingSpec
from engine.tracking import Tracker
tracker = Tracker(pathlib.Path(sys.argv[1]), TrackingSpec(run_id=sys.argv[2]))
for step in range(int(sys.argv[3]), 400):
    tracker.log(step, {"reward/mean": step})
    if step == int(sys.argv[4]):
        os._exit(9)
tracker.close()
"""


def test_a_stage_killed_again_and_again_logs_every_step_once(tmp_path, client, run_id):
    def attempt(start, killed_at):
        return subprocess.run([sys.executable, "-c", KILLED_STAGE, str(tmp_path), run_id, str(start), str(killed_at)],
                              cwd=Path(__file__).parents[3], env={**os.environ}, check=False).returncode

    # Each attempt starts again from a checkpoint before the kill.
    assert [attempt(0, 150), attempt(100, 260), attempt(250, 399), attempt(390, -1)] == [9, 9, 9, 0]
    assert _steps(client, run_id) == [(s, float(s)) for s in range(400)]


def test_no_password_in_the_log(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:canary-secret@127.0.0.1:{free_port()}")
    tracker = Tracker(tmp_path, TrackingSpec(run_id="0" * 32))
    tracker.log(0, {"x": 1})
    assert not tracker.close(deadline_s=2.0)
    assert "does not answer" in caplog.text and "canary" not in caplog.text
    assert all("canary" not in path.read_text() for path in tmp_path.iterdir())
