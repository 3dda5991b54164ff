"""Who answers a question: the registry's word, and the trigger that waits for it. The rest is under the scheduler."""

import asyncio
import itertools
from dataclasses import asdict
from datetime import timedelta
from types import SimpleNamespace

import pytest
from airflow.providers.standard.triggers import hitl
from airflow.sdk.exceptions import AirflowRuntimeError, ErrorType
from airflow.sdk.execution_time.comms import ErrorResponse
from airflow.sdk.timezone import utcnow
from mlflow import MlflowClient

from engine.errors import FaultError
from tasks import approval, registry, tracking
from tasks.approval import APPROVE, REJECT, Answer, ReviewTrigger, Subject, decided_in_mlflow

NAMES = (f"asked-{i}" for i in itertools.count())
SUBJECT = Subject("model", "1", "")


@pytest.fixture
def client(mlflow_uri):
    return MlflowClient(tracking_uri=mlflow_uri, registry_uri=mlflow_uri)


@pytest.fixture
def subject(client):
    model = next(NAMES)
    for number in (1, 2):
        run = tracking.parent_run("asked", f"{model}/{number}", name="a run", lineage=tracking.Lineage())
        registry.register_candidate(model, registry.CandidateFiles(
            export_uri="/exports", weights_hash="hash", run_id=run.run_id))
    return Subject(model, "1", "")


def test_nothing_is_decided_until_somebody_does(client, subject):
    assert decided_in_mlflow(subject) is None


@pytest.mark.parametrize(("said", "answer"), [
    ("approve", Answer(APPROVE, "a person in MLflow")),
    ("reject: no", Answer(REJECT, "a person in MLflow", "no"))])
def test_a_review_in_mlflow_is_the_answer(client, subject, said, answer):
    client.set_model_version_tag(subject.model, "1", "review", said)
    assert decided_in_mlflow(subject) == answer


def test_another_champion_withdraws_the_question_whatever_the_tag_says(client, subject):
    client.set_model_version_tag(subject.model, "1", "review", "approve")
    client.set_registered_model_alias(subject.model, registry.CHAMPION, "2")
    answer = decided_in_mlflow(subject)
    assert (answer.chosen, answer.by, answer.again) == (REJECT, "registry", True)
    assert "the champion is 2 now" in answer.reason


def test_nonsense_is_answered_on_the_version_and_the_question_stands(client, subject):
    client.set_model_version_tag(subject.model, "1", "review", "perhaps")
    assert decided_in_mlflow(subject) is None
    assert "'perhaps' is neither" in registry.read(subject.model, "1").tags[registry.REFUSED_TAG]


def test_a_version_that_was_deleted_is_not_waited_for(client, subject):
    client.delete_model_version(subject.model, "1")
    assert decided_in_mlflow(subject).chosen == REJECT


class Database:
    """What Airflow keeps of a question: one answer, the first."""

    def __init__(self):
        self.chosen, self.person = None, None

    def look(self, ti_id):
        person = self.person and SimpleNamespace(id="1", name=self.person)
        return SimpleNamespace(response_received=self.chosen is not None, chosen_options=self.chosen, params_input={},
                               responded_at=utcnow(), responded_by_user=person)

    def answer(self, ti_id, chosen_options, params_input, person=None):
        if self.chosen is not None:
            raise AirflowRuntimeError(ErrorResponse(error=ErrorType.API_SERVER_ERROR, detail={"status_code": 409}))
        self.chosen, self.person = chosen_options, person
        return self.look(ti_id)


def answered(monkeypatch, mlflow, timeout_s=30.0, database=None):
    """The event of a trigger that finds `mlflow` in MLflow, look by look."""
    database, looks = database or Database(), iter(mlflow)

    def look(subject):
        assert subject == SUBJECT
        found = next(looks, None)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(approval, "POLL_S", 0.01)
    monkeypatch.setattr(approval, "decided_in_mlflow", look)
    for module in (approval, hitl):
        monkeypatch.setattr(module, "update_hitl_detail_response", database.answer)
    monkeypatch.setattr(hitl, "get_hitl_detail_content_detail", database.look)
    first = ReviewTrigger(subject=asdict(SUBJECT), ti_id="ti", options=[APPROVE, REJECT], params={}, defaults=[REJECT],
                          timeout_datetime=utcnow() + timedelta(seconds=timeout_s), poke_interval=0.01)
    path, arguments = first.serialize()
    assert path == f"{ReviewTrigger.__module__}.{ReviewTrigger.__qualname__}"

    async def event():
        async for found in ReviewTrigger(**arguments).run():
            return found.payload

    return asyncio.run(event())


def test_an_answer_in_mlflow_becomes_the_answer_and_an_outage_before_it_is_waited_out(monkeypatch):
    event = answered(monkeypatch, [None, FaultError("MLflow is down"), None, Answer(APPROVE, "ada")])
    assert (event["chosen_options"], event["responded_by_user"]) == ([APPROVE], None)


def test_the_time_limit_answers_with_the_default(monkeypatch):
    event = answered(monkeypatch, [], timeout_s=0.05)
    assert event["chosen_options"] == [REJECT] and event["timedout"]


def test_of_two_answers_at_the_same_moment_the_first_counts(monkeypatch):
    database = Database()

    class Late(list):
        def __iter__(self):
            database.answer("ti", [REJECT], {}, person="grace")  # between the trigger's look and its answer
            yield Answer(APPROVE, "ada")

    event = answered(monkeypatch, Late(), database=database)
    assert event["chosen_options"] == [REJECT] and event["responded_by_user"]["name"] == "grace"
