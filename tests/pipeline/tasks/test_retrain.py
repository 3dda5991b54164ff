"""What a retraining takes, starts and counts as done; and when its DAG runs, by a clock that the test sets."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pendulum
import pytest
import yaml
from airflow.providers.standard.triggers.external_task import DagStateTrigger
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowSkipException,
    DagRunTriggerException,
    TaskDeferred,
)
from hypothesis import given
from hypothesis import strategies as st

from tasks import landing, retrain, runs
from tests.pipeline.examples import preset


def file(number):
    return landing.Landed(uri=f"/store/prompts/{number}.jsonl", source=f"/inbox/{number}.jsonl", sha256=f"{number:064}",
                          rows=1, bad_rows=0, landed_at=float(number), run_id="look")


def numbers(files):
    return [int(found.sha256) for found in files]


def trained(trainings, files, outcome):
    made = retrain.new_training("tiny", "m", files, trainings)
    return made.model_copy(update={"started_at": float(len(trainings)), "outcome": outcome})


arrivals = st.lists(st.integers(0, 5), min_size=1, max_size=6)


@given(arrivals, st.sets(st.integers(0, 30)))
def test_every_good_file_is_trained_on_once_and_every_bad_one_is_given_up(arriving, poison):
    landed, trainings = [], []
    for count in [*arriving, *[0] * 200]:
        landed += [file(len(landed) + k) for k in range(count)]
        files = retrain.next_files(landed, trainings)
        if not files:
            continue
        trainings.append(trained(trainings, files, "failed" if poison & set(numbers(files)) else "candidate"))
    assert retrain.next_files(landed, trainings) == []
    assert len({training.run_id for training in trainings}) == len(trainings), "an id is never used twice"
    everything = set(numbers(landed))
    used = [n for training in trainings if training.outcome == "candidate" for n in numbers(training.files)]
    assert sorted(used) == sorted(everything - poison)
    assert {int(sha) for sha in retrain.given_up(trainings)} == everything & poison
    # Every failure halves a company or counts against a file that was alone.
    assert sum(training.outcome == "failed" for training in trainings) <= 3 * len(everything)


def test_new_files_go_first_after_a_failure_and_then_take_turns_with_the_failed_ones():
    landed = [file(n) for n in range(4)]
    trainings = [trained([], landed, "failed")]
    taken = []
    for step in range(6):
        landed.append(file(10 + step))
        files = retrain.next_files(landed, trainings)
        taken.append(numbers(files))
        trainings.append(trained(trainings, files, "candidate"))
    assert taken == [[10], [0, 1], [11, 12], [2, 3], [13, 14], [15]]


def test_a_training_takes_the_oldest_hundred():
    landed = [file(n) for n in range(150)]
    assert numbers(retrain.next_files(landed, [])) == list(range(100))


def test_the_run_id_is_made_of_preset_and_contents_and_differs_by_try():
    files = [file(1), file(2)]
    first = trained([], files, "failed")
    assert trained([], files[::-1], "failed").run_id == first.run_id
    assert trained([first], files, "failed").run_id == first.run_id.removesuffix("-1") + "-2"
    assert retrain.new_training("other", "m", files, []).run_id[:-2] != first.run_id[:-2]
    assert trained([], files[:1], "failed").run_id[:-2] != first.run_id[:-2]


class Airflow:
    """What Airflow says of the runs of `train_ppo`, and what travels between the tasks."""

    def __init__(self):
        self.states, self.returned = {}, {}
        self.dag_id, self.run_id = "retrain", "scheduled__now"

    def get_dr_count(self, dag_id, run_ids=None, states=None):
        assert dag_id == "train_ppo"
        return sum((run_ids is None or run_id in run_ids) and (states is None or state in states)
                   for run_id, state in self.states.items())

    def xcom_pull(self, task_ids):
        return self.returned[task_ids]

    def xcom_push(self, key, value):
        self.returned[key] = value

    def choose(self, preset="tiny"):
        self.returned["choose"] = retrain.choose(params={"preset": preset}, ti=self)
        return self.returned["choose"]["run_id"]

    def train(self):
        return retrain.TrainOperator(task_id="train").execute({"ti": self})

    def record(self):
        return retrain.record(ti=self)


@pytest.fixture
def airflow(tmp_path, monkeypatch):
    for name in ("RATCHET_HOME", "RATCHET_STORE", "RATCHET_PRESETS"):
        monkeypatch.setenv(name, str(tmp_path))
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(preset()))
    return Airflow()


def land(number):
    folder = Path(landing._folder("landed", str(number)))
    folder.mkdir(parents=True)
    (folder / "landed.json").write_text(file(number).model_dump_json())


def end(airflow, run_id, candidate=None):
    """The training ends; with a candidate when a version is given."""
    airflow.states[run_id] = "success" if candidate else "failed"
    if candidate:
        runs.write_candidate(runs.run_root("train_ppo", run_id), runs.CandidateFile(
            model="tiny", version=candidate, stage=1, export_uri="/e", weights_hash="w", prompts="/p"))


def test_a_training_starts_from_the_champion_on_the_presets_prompts_and_the_landed_ones(airflow):
    land(1)
    run_id = airflow.choose()
    with pytest.raises(DagRunTriggerException) as started:
        airflow.train()
    asked = started.value
    assert (asked.trigger_dag_id, asked.dag_run_id, asked.logical_date) == ("train_ppo", run_id, None)
    assert asked.wait_for_completion and asked.deferrable and "scheduled__now with 1 landed" in asked.note
    assert {key: asked.conf[key] for key in ("preset", "start_from")} == {"preset": "tiny", "start_from": "champion"}
    own = preset()["prepare"]["train"]["sources"]
    assert yaml.safe_load(asked.conf["override"]) == {
        "prepare": {"train": {"sources": [*own, {"kind": "file", "uri": file(1).uri}]}}}
    json.dumps(asked.conf)


def test_files_are_used_when_their_training_registered_a_candidate(airflow):
    land(1)
    run_id = airflow.choose()
    end(airflow, run_id, candidate="7")
    assert airflow.record() == {"run_id": run_id, "candidate": "tiny/7"}
    with pytest.raises(AirflowSkipException, match="nothing new for tiny: 1 files have landed, 0 of them"):
        airflow.choose()
    land(2)
    assert [found.uri for found in retrain._read(airflow.choose()).files] == [file(2).uri]


def test_what_a_model_has_seen_counts_under_whatever_preset(airflow, tmp_path):
    for name, model in (("renamed", "tiny"), ("sibling", "another")):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(preset(registry={"model": model})))
    land(1)
    end(airflow, airflow.choose(), candidate="1")
    with pytest.raises(AirflowSkipException, match="nothing new for tiny"):
        airflow.choose("renamed")
    assert [found.uri for found in retrain._read(airflow.choose("sibling")).files] == [file(1).uri]


def test_a_failed_training_is_tried_again_twice_alone_and_a_mended_one_counts(airflow):
    land(1)
    first = airflow.choose()
    end(airflow, first)
    with pytest.raises(AirflowFailException, match="registered no candidate"):
        airflow.record()
    second = airflow.choose()
    assert second != first
    end(airflow, second)
    with pytest.raises(AirflowSkipException, match="1 of them were given up /inbox/1.jsonl"):
        airflow.choose()
    end(airflow, first, candidate="3")
    with pytest.raises(AirflowSkipException, match="0 of them were given up"):
        airflow.choose()


def test_whoever_decides_again_finds_the_training_that_is_there(airflow):
    land(1)
    run_id = airflow.choose()
    land(2)
    assert airflow.choose() == run_id, "decided, not started yet"
    with pytest.raises(DagRunTriggerException):
        airflow.train()
    airflow.states[run_id] = "running"
    assert airflow.choose() == run_id
    with pytest.raises(TaskDeferred) as waiting:
        airflow.train()
    assert isinstance(waiting.value.trigger, DagStateTrigger) and waiting.value.trigger.run_ids == [run_id]
    assert airflow.returned["trigger_run_id"] == run_id, "the link to the run needs it"
    with pytest.raises(AirflowException, match="active again"):
        airflow.record()
    end(airflow, run_id, candidate="1")
    airflow.record()
    assert airflow.train() is None, "cleared after its end: nothing starts"


def test_a_lost_record_does_not_train_twice(airflow):
    land(1)
    run_id = airflow.choose()
    end(airflow, run_id, candidate="1")
    Path(retrain._where(run_id)).unlink()
    assert airflow.choose() == run_id
    with pytest.raises(TaskDeferred):
        airflow.train()
    assert airflow.record()["candidate"] == "tiny/1"


def test_somebody_elses_training_comes_first(airflow):
    land(1)
    airflow.states["manual"] = "queued"
    with pytest.raises(AirflowSkipException, match="1 runs of train_ppo are active"):
        airflow.choose()
    assert retrain.read_trainings() == []
    airflow.states["manual"] = "failed"
    assert airflow.choose()


@pytest.mark.parametrize(("content", "said"), [
    (preset(train={}), "train"), (None, "preset: 'tiny' is not in")])
def test_a_preset_that_cannot_be_trained_is_refused_before_anything_is_written(airflow, tmp_path, content, said):
    land(1)
    (tmp_path / "tiny.yaml").unlink()
    if content:
        (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(AirflowFailException, match=said):
        airflow.choose()
    assert retrain.read_trainings() == []


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """Sets the time by which Airflow plans, and asks it for the runs that it would start then."""
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path))
    monkeypatch.setenv("RATCHET_RETRAIN_PRESET", "tiny")
    monkeypatch.setenv("RATCHET_RETRAIN_CRON", "0 3 * * *")
    from airflow.serialization.encoders import coerce_to_core_timetable
    from airflow.timetables import trigger
    from airflow.timetables.base import TimeRestriction

    timetable = coerce_to_core_timetable(retrain.schedule())

    def due(now, last=None):
        """The runs that a scheduler that looks at `now` for the first time since the run `last` would start."""
        monkeypatch.setattr(trigger, "utcnow", lambda: now)
        found = []
        while True:
            info = timetable.next_dagrun_info(
                last_automated_data_interval=last, restriction=TimeRestriction(None, None, catchup=False))
            if info.run_after > now:
                return found, last
            found.append(info.run_after)
            last = info.data_interval

    return due


def at(day, hour):
    return pendulum.instance(datetime(2026, 1, day, hour, tzinfo=UTC))


def test_the_cron_starts_one_run_a_tick_and_one_for_all_the_ticks_that_a_late_scheduler_missed(clock):
    runs_, last = clock(at(1, 12))
    assert runs_ == [], "a new DAG waits for its first tick"
    runs_, last = clock(at(2, 3), last)
    assert runs_ == [at(2, 3)]
    assert clock(at(2, 4), last)[0] == [] and clock(at(3, 2), last)[0] == []
    runs_, last = clock(at(9, 15), last)
    assert runs_ == [at(9, 3)]


def test_the_schedule_follows_what_the_deployment_sets(monkeypatch):
    from airflow.sdk import AssetOrTimeSchedule

    for name in ("PRESET", "CRON"):
        monkeypatch.delenv(f"RATCHET_RETRAIN_{name}", raising=False)
    assert retrain.schedule() is None
    monkeypatch.setenv("RATCHET_RETRAIN_PRESET", "tiny")
    assert retrain.schedule() == [retrain.PROMPTS]
    monkeypatch.setenv("RATCHET_RETRAIN_CRON", "0 3 * * *")
    assert isinstance(retrain.schedule(), AssetOrTimeSchedule)
