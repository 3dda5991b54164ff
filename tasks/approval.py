"""Ask a policy, or a person in Airflow or in MLflow, whether a candidate is promoted; the first answer counts.

While a person is waited for, a trigger looks at the model version in MLflow every few seconds: a review made there
(`registry.review_of`) answers Airflow's question, and so does a champion that changed, since the question is then about
evidence that is out of date. An answer given in Airflow resumes the task at once; the database takes only one of them.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.providers.standard.triggers.hitl import HITLTrigger
from airflow.sdk.definitions.context import Context
from airflow.sdk.exceptions import AirflowRuntimeError
from airflow.sdk.execution_time.hitl import update_hitl_detail_response, upsert_hitl_detail
from airflow.sdk.timezone import utcnow
from airflow.triggers.base import TriggerEvent
from asgiref.sync import sync_to_async

from engine.errors import FaultError, RefusedError
from tasks import registry
from tasks.operators import airflow_errors

APPROVE, REJECT = ApprovalOperator.APPROVE, ApprovalOperator.REJECT
POLL_S = 5.0
"""Between two looks at MLflow."""


@dataclass(frozen=True)
class Subject:
    """What is to be decided: a version against the champion that it was compared with."""

    model: str
    version: str
    base: str
    """Version of that champion; empty: there was none."""


@dataclass(frozen=True)
class Question:
    """What a person is asked, and whether one is asked at all."""

    subject: Subject
    automatic: bool
    """A passed gate is an approval."""
    timeout: timedelta
    """How long a person may take; then the candidate is rejected."""
    body: str
    """The evidence, Markdown."""


@dataclass(frozen=True)
class Answer:
    """What was decided."""

    chosen: str
    """APPROVE or REJECT."""
    by: str
    """A person's name, `policy`, `time limit` or `registry`."""
    reason: str = ""
    again: bool = False
    """The champion changed: the candidate is to be reviewed again instead of being rejected."""


def decided_in_mlflow(subject: Subject) -> Answer | None:
    """What the registry says without anybody being asked; None when it says nothing yet.

    A tag that is neither an approval nor a rejection is answered on the version and does not count.
    """
    version = registry.read(subject.model, subject.version)
    if version is None:
        return Answer(REJECT, "a person in MLflow", "the version was deleted")
    try:
        registry.check_base(version, subject.base)
        review = registry.review_of(version)
    except registry.ChampionChanged as changed:
        return Answer(REJECT, "registry", str(changed), again=True)
    except registry.RegistryConflict as nonsense:
        registry.refuse_review(version, str(nonsense))
        return None
    if review is None:
        return None
    return Answer(APPROVE if review.approved else REJECT, review.by, review.reason)


class PolicyApprovalOperator(ApprovalOperator):
    """Airflow's approval, answered at once where the policy or MLflow has the answer, and also answered in MLflow."""

    def __init__(self, *, question: Callable[[Context], Question], **kwargs: Any):
        """Args: question: what to ask, made when the task runs."""
        super().__init__(defaults=self.REJECT, **kwargs)
        self.question = question

    def execute(self, context: Context) -> Any:
        """Returns: the answer where nobody had to be asked; a person's comes to `execute_complete`."""
        with airflow_errors():
            asked = self.question(context)
            answer = decided_in_mlflow(asked.subject)
        if answer is None and asked.automatic:
            answer = Answer(APPROVE, "policy")
        if answer is not None:
            self.log.info("Not asked: %s by %s. %s", answer.chosen, answer.by, answer.reason)
            return self._settle(context, answer, {
                "chosen_options": [answer.chosen], "params_input": {}, "responded_at": utcnow(),
                "responded_by_user": None})
        ti_id = context["ti"].id
        question = {"options": self.options, "defaults": self.defaults, "multiple": False}
        upsert_hitl_detail(ti_id=ti_id, subject=self.subject, body=asked.body, params=self.serialized_params,
                           assigned_users=self.assigned_users, **question)
        self.log.info("Waiting for an answer here, or for the tag `%s` on %s/%s in MLflow, for %s", registry.REVIEW_TAG,
                      asked.subject.model, asked.subject.version, asked.timeout)
        self.defer(method_name="execute_complete", trigger=ReviewTrigger(
            subject=asdict(asked.subject), ti_id=ti_id, params=self.serialized_params,
            timeout_datetime=utcnow() + asked.timeout, poke_interval=POLL_S, **question))

    def execute_complete(self, context: Context, event: dict[str, Any]) -> Any:
        """Find out whose answer it is."""
        if "error" in event:
            return super().execute_complete(context, event)
        chosen, person = event["chosen_options"][0], event["responded_by_user"]
        if person:
            answer = Answer(chosen, person["name"])
        else:
            with airflow_errors():
                found = decided_in_mlflow(self.question(context).subject)
            limit = Answer(chosen, "a person in MLflow") if chosen == self.APPROVE else Answer(
                chosen, "time limit", "nobody answered in time")
            answer = found if found is not None and found.chosen == chosen else limit
        return self._settle(context, answer, event)

    def _settle(self, context: Context, answer: Answer, event: dict[str, Any]) -> Any:
        # Kept first: on a rejection the base class skips what follows and returns nothing.
        context["ti"].xcom_push(key="answer", value=asdict(answer))
        return super().execute_complete(context, event)


class ReviewTrigger(HITLTrigger):
    """Airflow's wait for an answer or the time limit; what MLflow says is given as the answer."""

    def __init__(self, *, subject: dict[str, str], **kwargs: Any):
        """Args: subject: `Subject` as a dictionary; kwargs: of Airflow's trigger."""
        super().__init__(**kwargs)
        self.subject = subject

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """How the triggerer makes it again."""
        return "tasks.approval.ReviewTrigger", super().serialize()[1] | {"subject": self.subject}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait for the answer, whoever gives it."""
        answered = asyncio.ensure_future(anext(super().run()))
        try:
            while not answered.done():
                await asyncio.wait({answered}, timeout=POLL_S)
                if not answered.done():
                    await self._carry_over()
            yield answered.result()
        finally:
            answered.cancel()

    async def _carry_over(self) -> None:
        """Give what was decided in MLflow as Airflow's answer; the base class then finds it."""
        try:
            answer = await asyncio.to_thread(decided_in_mlflow, Subject(**self.subject))
        except (FaultError, RefusedError) as error:
            self.log.warning("MLflow is looked at again in %s s: %s", POLL_S, error)
            return
        if answer is None:
            return
        self.log.info("Decided in MLflow: %s by %s. %s", answer.chosen, answer.by, answer.reason)
        try:
            await sync_to_async(update_hitl_detail_response)(
                ti_id=self.ti_id, chosen_options=[answer.chosen], params_input={})
        except AirflowRuntimeError as error:
            self.log.info("Airflow has an answer already: %s", error)
