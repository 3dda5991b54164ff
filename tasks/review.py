"""What the tasks of `review_candidate` do: find the two models, judge the evidence, promote or reject."""

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from airflow.sdk.definitions.context import Context
from airflow.sdk.exceptions import AirflowFailException

from engine.errors import SpecError
from engine.spec import EvaluateSpec, Evaluation, RunResult
from engine.store import hash_model_dir, read_text
from tasks import registry, reports, runs, stages
from tasks.assets import CHAMPION
from tasks.gates import GateEvidence, gate
from tasks.operators import airflow_errors


def load(**context: Any) -> dict[str, str]:
    """Find the candidate, from the event that started the run or from its parameters, and the champion."""
    with airflow_errors():
        model, wanted = _asked_for(context)
        candidate = registry.read(model, wanted)
        if candidate is None:
            raise SpecError(f"version: the registry has no {model}/{wanted}")
        if not candidate.tags.get("ratchet.run"):
            raise SpecError(f"{candidate.label} has no tag ratchet.run: no Ratchet run made it")
        champion = registry.read(model, registry.CHAMPION)
        if champion is not None and champion.version == candidate.version:
            raise SpecError(f"version: {candidate.label} is the champion already; there is nothing to review")
        return {
            "model": model, "candidate": candidate.version, "run_uri": candidate.tags["ratchet.run"],
            "champion": "" if champion is None else champion.version}


def compare_job(context: Context) -> EvaluateSpec:
    """The evaluation of both models; everything in it was evaluated before when the champion has not changed."""
    found = _loaded(context)
    file, made = runs.read_run(found["run_uri"]), runs.read_candidate(found["run_uri"])
    champion = _champion(found)
    run = stages.Run(pipeline=file.pipeline, root=found["run_uri"], evaluations=runs.evaluation_cache(),
                     base_model=file.base_model, results={})
    models = {"champion": champion.export_uri if champion else file.base_model, "candidate": made.export_uri}
    return stages.comparison_spec(run, models, prompts=made.prompts)


def judge(context: Context) -> stages.Decision:
    """Apply the gate; its evidence goes to the run's files and, as Markdown, to the approval."""
    found = _loaded(context)
    file, made = runs.read_run(found["run_uri"]), runs.read_candidate(found["run_uri"])
    result = RunResult.model_validate(context["ti"].xcom_pull(task_ids="evaluate"))
    evaluation = Evaluation.model_validate_json(read_text(result.outputs["evaluation"]))
    verdict = gate(GateEvidence(
        candidate=evaluation.of("candidate"), champion=evaluation.of("champion"),
        files_hash=hash_model_dir(made.export_uri), training=made.training,
        pass_threshold=evaluation.pass_threshold), file.pipeline.gate)
    evidence = {"version": found["candidate"], **verdict.to_dict()}
    runs.write_review(found["run_uri"], evidence)
    reports.publish_verdict(found["run_uri"])
    context["ti"].xcom_push(key="evidence", value=verdict.markdown())
    return stages.Decision(verdict.passed, "; ".join(verdict.reasons))


def approval_policy(context: Context) -> tuple[bool, timedelta]:
    """Whether a passed gate is an approval, and how long a person may take."""
    policy = runs.read_run(_loaded(context)["run_uri"]).pipeline.gate
    return policy.approval == "automatic", timedelta(hours=policy.approval_timeout_hours)


def promote(**context: Any) -> dict[str, str]:
    """Make the candidate the champion and announce it."""
    with airflow_errors():
        found = _loaded(context)
        candidate = _version(found["model"], found["candidate"])
        with registry_conflicts():
            champion = registry.promote(
                candidate, base=_champion(found), files_hash=hash_model_dir(candidate.export_uri),
                decision=_decision(context, "approved"))
        announcement = {"model": champion.model, "version": champion.version, "export_uri": champion.export_uri,
                        "weights_hash": champion.weights_hash}
        context["outlet_events"][CHAMPION].extra = announcement
        return announcement


def reject(**context: Any) -> dict[str, str]:
    """Keep the reason why the candidate was not promoted."""
    with airflow_errors():
        found = _loaded(context)
        decision = _decision(context, "rejected")
        with registry_conflicts():
            registry.reject(_version(found["model"], found["candidate"]), decision)
        return {"model": found["model"], "version": found["candidate"], "by": decision.by, "reason": decision.reason}


@contextlib.contextmanager
def registry_conflicts() -> Iterator[None]:
    """A registry that changed meanwhile fails the task for good: trying again would only find it changed again."""
    try:
        yield
    except registry.RegistryConflict as conflict:
        raise AirflowFailException(f"RegistryConflict: {conflict}") from None


def _decision(context: Context, verb: str) -> registry.Decision:
    ti = context["ti"]
    answer = ti.xcom_pull(task_ids="approve", key="answer") or {"by": "gate"}
    reason = ti.xcom_pull(task_ids="gate")
    if answer["by"] not in ("gate", "policy"):
        reason = f"{verb} by {answer['by']}; gate: {reason}"
    return registry.Decision(by=answer["by"], reason=reason, gate=ti.xcom_pull(task_ids="gate", key="evidence") or "",
                             url=f"{ti.dag_id}/{ti.run_id}")


def _asked_for(context: Any) -> tuple[str, str]:
    events = [event for listed in context["triggering_asset_events"].values() for event in listed]
    if events:
        # Events that came while a review ran start one run together: the newest candidate is the one to review.
        newest = max(events, key=lambda event: event.timestamp)
        return newest.extra["model"], newest.extra["version"]
    params = context["params"]
    if not params.get("model"):
        raise SpecError("model: give the name of the registered model to review")
    return params["model"], str(params.get("version") or registry.CANDIDATE)


def _loaded(context: Context) -> dict[str, str]:
    return context["ti"].xcom_pull(task_ids="load")


def _champion(found: dict[str, str]) -> registry.Version | None:
    return _version(found["model"], found["champion"]) if found["champion"] else None


def _version(model: str, number: str) -> registry.Version:
    version = registry.read(model, number)
    if version is None:
        raise SpecError(f"the registry has no {model}/{number} any more; start the review again")
    return version

