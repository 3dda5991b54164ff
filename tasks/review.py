"""What the tasks of `review_candidate` do: find the two models, judge the evidence, ask, promote or reject."""

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from airflow.sdk.definitions.context import Context
from airflow.sdk.exceptions import AirflowFailException

from engine.errors import SpecError
from engine.spec import EvaluateSpec, Evaluation, RunResult
from engine.store import hash_model_dir, join, read_text, write_bytes
from tasks import links, notes, registry, reports, runs, stages, tracking
from tasks.approval import Question, Subject
from tasks.assets import CHAMPION, announce_candidate
from tasks.evidence import pairs_of, review_page, summary
from tasks.gates import GateEvidence, gate
from tasks.jobs import safe_name
from tasks.operators import airflow_errors, skip

DECIDED = ("champion", "replaced", "rejected", "rolled_back")
"""States of a version that is not reviewed any more."""


def load(**context: Any) -> dict[str, str]:
    """Find the candidate, from the event that started the run or from its parameters, and the champion."""
    with airflow_errors():
        model, wanted = _asked_for(context)
        candidate = registry.read(model, wanted)
        if candidate is None:
            raise SpecError(f"version: the registry has no {model}/{wanted}")
        if not candidate.tags.get("ratchet.run"):
            raise SpecError(f"{candidate.label} has no tag ratchet.run: no Ratchet run made it")
        if candidate.status in DECIDED:
            raise SpecError(f"version: {candidate.label} is {candidate.status} already, decided by "
                            f"{candidate.tags.get('ratchet.decided_by', '?')}; there is nothing to review")
        champion = registry.read(model, registry.CHAMPION)
        if champion is not None and champion.version == candidate.version:
            by_hand = (f"{candidate.label} was made champion by hand before its review; it stays that. To have it "
                       "reviewed, point the alias champion at the version to compare it with")
            registry.refuse_review(candidate, by_hand)
            raise SpecError(f"version: {by_hand}")
        if champion is not None and not champion.export_uri:
            raise SpecError(f"{champion.label} is the champion but has no tag ratchet.export; set the tag to its "
                            "Hugging Face directory, so that it can be compared with")
        return {
            "model": model, "candidate": candidate.version, "run_uri": candidate.tags["ratchet.run"],
            "champion": "" if champion is None else champion.version}


def compare_job(context: Context) -> EvaluateSpec:
    """The evaluation of both models; everything in it was evaluated before when the champion has not changed."""
    found = _loaded(context)
    file, made = runs.read_run(found["run_uri"]), runs.read_candidate(found["run_uri"])
    links.show_run(context, file)
    champion = _champion(found)
    run = stages.Run(pipeline=file.pipeline, root=found["run_uri"], evaluations=runs.evaluation_cache(),
                     base_model=file.base_model, results={})
    models = {"champion": champion.export_uri if champion else file.base_model, "candidate": made.export_uri}
    return stages.comparison_spec(run, models, prompts=made.prompts)


def judge(context: Context) -> stages.Decision:
    """Apply the gate; its evidence goes to the run's files, to the model version's page and to the approval."""
    found = _loaded(context)
    candidate = _version(found["model"], found["candidate"])
    try:
        registry.check_base(candidate, found["champion"])
    except registry.ChampionChanged as changed:
        return stages.Decision(False, _again(context, changed))
    file, made = runs.read_run(found["run_uri"]), runs.read_candidate(found["run_uri"])
    links.show_run(context, file)
    result = RunResult.model_validate(context["ti"].xcom_pull(task_ids="evaluate"))
    evaluation = Evaluation.model_validate_json(read_text(result.outputs["evaluation"]))
    verdict = gate(GateEvidence(
        candidate=evaluation.of("candidate"), champion=evaluation.of("champion"),
        files_hash=hash_model_dir(made.export_uri), training=made.training,
        pass_threshold=evaluation.pass_threshold), file.pipeline.gate)
    runs.write_review(found["run_uri"], {"version": found["candidate"], **verdict.to_dict()})
    reports.publish_verdict(found["run_uri"])
    pairs = pairs_of(read_text(result.outputs["samples"]).splitlines())
    pages = tracking.review_links(file.tracking, found["model"], found["candidate"])
    write_bytes(_page(context), review_page(verdict, pairs, pages))
    text = summary(verdict, pages)
    registry.describe(candidate, text)
    context["ti"].xcom_push(key="evidence", value=text)
    context["ti"].xcom_push(key="verdict", value="passed" if verdict.passed else "failed")
    return stages.Decision(verdict.passed, "; ".join(verdict.reasons))


def question(context: Context) -> Question:
    """What a person is asked, and whether a passed gate is an approval."""
    found = _loaded(context)
    policy = runs.read_run(found["run_uri"]).pipeline.gate
    how = (f"\nTo answer in MLflow instead, set the tag `{registry.REVIEW_TAG}` of this model version to `approve`, or "
           "to `reject: and why`.\n")
    return Question(
        Subject(found["model"], found["candidate"], found["champion"]), policy.approval == "automatic",
        timedelta(hours=policy.approval_timeout_hours), read_text(_page(context)) + how)


def promote(**context: Any) -> dict[str, str]:
    """Make the candidate the champion and announce it."""
    with airflow_errors():
        found = _loaded(context)
        candidate, decision = _version(found["model"], found["candidate"]), _decision(context, "approved")
        if context["ti"].xcom_pull(task_ids="gate", key="verdict") != "passed":
            # Somebody marked tasks by hand.
            raise AirflowFailException(f"{candidate.label}: the gate of this review has not passed; clear its task")
        try:
            with registry_conflicts():
                champion = registry.promote(
                    candidate, base=_champion(found), files_hash=hash_model_dir(candidate.export_uri),
                    decision=decision)
        except registry.ChampionChanged as changed:
            skip(_again(context, changed))
        reports.publish_verdict(found["run_uri"])
        notes.say(context, f"**{champion.label}** is the champion: {decision.reason}")
        return announce(context, champion)


def announce(context: Any, champion: registry.Version) -> dict[str, str]:
    """Put on the asset `champion` what a serving team needs to load the model; the task must have it as outlet."""
    announcement = {"model": champion.model, "version": champion.version, "export_uri": champion.export_uri,
                    "weights_hash": champion.weights_hash}
    context["outlet_events"][CHAMPION].extra = announcement
    return announcement


def reject(**context: Any) -> dict[str, str]:
    """Keep the reason why the candidate was not promoted."""
    with airflow_errors():
        found = _loaded(context)
        if changed := _changed(context):
            skip(f"not rejected but reviewed again: {changed}")
        decision = _decision(context, "rejected")
        with registry_conflicts():
            registry.reject(_version(found["model"], found["candidate"]), decision)
        reports.publish_verdict(found["run_uri"])
        notes.say(context, f"**{found['model']}/{found['candidate']}** was rejected: {decision.reason}")
        return {"model": found["model"], "version": found["candidate"], "by": decision.by, "reason": decision.reason}


def review_again(**context: Any) -> dict[str, str]:
    """Announce the candidate once more: the champion that it was compared with is not the champion any more."""
    changed = _changed(context)
    if not changed:
        skip("the champion is the one that the candidate was compared with")
    found = _loaded(context)
    announcement = announce_candidate(context, found["model"], found["candidate"], found["run_uri"])
    notes.say(context, f"**{found['model']}/{found['candidate']}** is reviewed again: {changed}")
    return {**announcement, "reason": changed}


@contextlib.contextmanager
def registry_conflicts() -> Iterator[None]:
    """A registry that changed meanwhile fails the task for good: trying again would only find it changed again."""
    try:
        yield
    except registry.ChampionChanged:
        raise
    except registry.RegistryConflict as conflict:
        raise AirflowFailException(f"RegistryConflict: {conflict}") from None


def _again(context: Any, changed: registry.ChampionChanged) -> str:
    """Keep that the evidence is out of date, for the tasks `reject` and `review_again`."""
    context["ti"].xcom_push(key="again", value=str(changed))
    return str(changed)


def _changed(context: Any) -> str:
    """Why the candidate is to be reviewed again; empty when its evidence counts."""
    ti = context["ti"]
    answer = ti.xcom_pull(task_ids="approve", key="answer") or {}
    found = [ti.xcom_pull(task_ids=task, key="again") for task in ("gate", "promote")]
    return next((reason for reason in found if reason), answer.get("reason", "") if answer.get("again") else "")


def _decision(context: Context, verb: str) -> registry.Decision:
    ti = context["ti"]
    answer = ti.xcom_pull(task_ids="approve", key="answer") or {
        # Approved without an answer: a person marked the task approve as done.
        "by": "gate" if verb == "rejected" else "a person in Airflow", "reason": ""}
    reason = ti.xcom_pull(task_ids="gate")
    if answer["by"] not in ("gate", "policy"):
        said = f" ({answer['reason']})" if answer["reason"] else ""
        reason = f"{verb} by {answer['by']}{said}; gate: {reason}"
    return registry.Decision(by=answer["by"], reason=reason, gate=ti.xcom_pull(task_ids="gate", key="evidence") or "",
                             url=f"{ti.dag_id}/{ti.run_id}", verdict=ti.xcom_pull(task_ids="gate", key="verdict") or "")


def _asked_for(context: Any) -> tuple[str, str]:
    # All events of a run are about one version, their partition.
    event = next((event for listed in context["triggering_asset_events"].values() for event in listed), None)
    if event is not None:
        return event.extra["model"], event.extra["version"]
    params = context["params"]
    if not params.get("model"):
        raise SpecError("model: give the name of the registered model to review")
    return params["model"], str(params.get("version") or registry.CANDIDATE)


def _page(context: Any) -> str:
    """Where this review's evidence is."""
    return join(_loaded(context)["run_uri"], "reviews", f"{safe_name(context['ti'].run_id)}.md")


def _loaded(context: Context) -> dict[str, str]:
    return context["ti"].xcom_pull(task_ids="load")


def _champion(found: dict[str, str]) -> registry.Version | None:
    return _version(found["model"], found["champion"]) if found["champion"] else None


def _version(model: str, number: str) -> registry.Version:
    version = registry.read(model, number)
    if version is None:
        raise SpecError(f"the registry has no {model}/{number} any more; start the review again")
    return version
