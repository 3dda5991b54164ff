"""What the tasks of a review decide by themselves; the whole of it runs in tests/pipeline/dags/test_review.py."""

from types import SimpleNamespace

import pytest
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException
from airflow.sdk.execution_time.context import OutletEventAccessors
from mlflow import MlflowClient

from tasks import registry, review, tracking
from tasks.assets import CANDIDATE, announce_candidate


def test_an_announced_candidate_is_reviewed_whatever_the_form_says():
    event = SimpleNamespace(extra={"model": "a", "version": "2", "run_uri": "/r"})
    context = {"triggering_asset_events": {CANDIDATE: [event, event]}, "params": {"model": "b", "version": "1"}}
    assert review._asked_for(context) == ("a", "2")


@pytest.mark.parametrize("model", ["tiny", "m" * 256])
def test_a_candidate_is_announced_as_a_partition_of_its_own(model):
    events = OutletEventAccessors()
    announced = [announce_candidate({"outlet_events": events}, model, version, "/r") for version in ("1", "2")]
    assert announced[1] == events[CANDIDATE].extra == {"model": model, "version": "2", "run_uri": "/r"}
    assert events[CANDIDATE].partition_keys == {f"{model}/1"[-250:], f"{model}/2"[-250:]}


class Task:
    """A task instance that knows what earlier tasks have left."""

    dag_id, run_id = "review_candidate", "r"

    def __init__(self, **left):
        self.left = left

    def xcom_push(self, key, value):
        self.left[f"_{key}"] = value

    def xcom_pull(self, task_ids, key="return_value"):
        return self.left.get(f"{task_ids}_{key}")


FOUND = {"model": "marked", "candidate": "1", "champion": "", "run_uri": "/runs/1"}


@pytest.fixture
def version(mlflow_uri):
    client = MlflowClient(tracking_uri=mlflow_uri, registry_uri=mlflow_uri)
    run = tracking.parent_run("marked", "marked/1", name="a run", lineage=tracking.Lineage())
    registry.register_candidate("marked", registry.CandidateFiles(
        export_uri="/exports", weights_hash="hash", run_id=run.run_id, run_uri="/runs/1"))
    yield client
    client.delete_registered_model("marked")


@pytest.mark.parametrize("verdict", [None, "failed"])
def test_marking_tasks_by_hand_does_not_get_a_candidate_past_its_gate(version, verdict):
    left = {"load_return_value": FOUND, "gate_verdict": verdict, "approve_answer": {"by": "ada", "reason": ""}}
    with pytest.raises(AirflowFailException, match="marked/1: the gate of this review has not passed"):
        review.promote(ti=Task(**left))
    assert registry.read("marked", registry.CHAMPION) is None


def test_an_approval_that_was_marked_by_hand_is_not_called_the_gates():
    ti = Task(gate_return_value="it rose", gate_verdict="passed")
    assert review._decision({"ti": ti}, "approved").by == "a person in Airflow"
    assert review._decision({"ti": ti}, "rejected").by == "gate"


def test_a_candidate_made_champion_by_hand_before_its_review_is_told_so_and_left_alone(version):
    version.set_registered_model_alias("marked", registry.CHAMPION, "1")
    context = {"params": {"model": "marked", "version": "1"}, "triggering_asset_events": {}}
    with pytest.raises(AirflowFailException, match="made champion by hand before its review"):
        review.load(**context)
    assert "by hand" in registry.read("marked", "1").tags[registry.REFUSED_TAG]
    assert registry.read("marked", registry.CHAMPION).version == "1"


def test_a_champion_without_a_directory_cannot_be_compared_with_and_says_what_to_do(version):
    run = tracking.parent_run("marked", "marked/2", name="a run", lineage=tracking.Lineage())
    registry.register_candidate("marked", registry.CandidateFiles(
        export_uri="/exports", weights_hash="hash", run_id=run.run_id))
    version.delete_model_version_tag("marked", "2", "ratchet.export")
    version.set_registered_model_alias("marked", registry.CHAMPION, "2")
    context = {"params": {"model": "marked", "version": "1"}, "triggering_asset_events": {}}
    with pytest.raises(AirflowFailException, match=r"marked/2 is the champion but has no tag ratchet.export; set"):
        review.load(**context)


@pytest.mark.parametrize("left", [
    {"gate_again": "the champion is 2 now"}, {"promote_again": "the champion is 2 now"},
    {"approve_answer": {"by": "registry", "reason": "the champion is 2 now", "again": True}}])
def test_evidence_that_is_out_of_date_is_announced_again_and_not_rejected(left):
    ti, events = Task(load_return_value=FOUND, **left), OutletEventAccessors()
    with pytest.raises(AirflowSkipException, match="reviewed again: the champion is 2 now"):
        review.reject(ti=ti)
    assert review.review_again(ti=ti, outlet_events=events)["reason"] == "the champion is 2 now"
    assert events[CANDIDATE].extra == {"model": "marked", "version": "1", "run_uri": "/runs/1"}
    assert events[CANDIDATE].partition_keys == {"marked/1"}


def test_a_rejection_is_not_announced_again():
    ti = Task(load_return_value=FOUND, approve_answer={"by": "ada", "reason": "no", "again": False})
    with pytest.raises(AirflowSkipException):
        review.review_again(ti=ti, outlet_events=OutletEventAccessors())
