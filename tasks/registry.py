"""The MLflow model registry: candidates, the champion, and moving from one to the other.

A version is one exported Hugging Face directory. MLflow refuses sources outside a run's artifacts, so a version's
source is a note in its run's artifacts and the directory's URI is the tag `ratchet.export`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from engine.errors import RefusedError
from engine.spec.tracking import clean_metric_name
from tasks.tracking import mlflow_client

CANDIDATE, CHAMPION, PREVIOUS = "candidate", "champion", "previous_champion"
STATUS = "ratchet.status"
"""Tag: `candidate`, `champion`, `replaced`, `rejected` or `rolled_back`."""
REVIEW_TAG = "review"
"""Tag that a person sets in MLflow's UI: `approve` or `reject`, if they like with a reason: `reject: too long`."""
REVIEWER_TAG = "reviewer"
"""Tag with that person's name, if they like: MLflow does not keep who sets a tag."""
REFUSED_TAG = "ratchet.review_refused"
"""Tag: why a review made in MLflow was not followed."""
LONGEST_TEXT = 5000
"""Characters that MLflow's database has for a description or a tag."""


@dataclass(frozen=True)
class Version:
    """One model version of the registry."""

    model: str
    version: str
    export_uri: str
    """Hugging Face directory."""
    weights_hash: str
    run_id: str
    tags: Mapping[str, str]
    aliases: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """`name/3`."""
        return f"{self.model}/{self.version}"

    @property
    def status(self) -> str:
        """`candidate`, `champion`, `replaced`, `rejected` or `rolled_back`; empty for one that Ratchet did not make."""
        return self.tags.get(STATUS, "")


@dataclass(frozen=True)
class CandidateFiles:
    """What a candidate is made of."""

    export_uri: str
    weights_hash: str
    run_id: str
    """MLflow run that made it: a retry with the same run and hash finds the version instead of making another."""
    run_uri: str = ""
    """Where the run keeps its files; tag `ratchet.run`."""
    spec_hash: str = ""
    prompts_hash: str = ""
    base: str = ""
    """Version number of the champion it was trained from or compared with; empty: none."""
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """Who decided about a version, and why."""

    by: str
    """A person's name, or `policy`."""
    reason: str
    gate: str = ""
    """Gate result as Markdown; goes to the version's description."""
    url: str = ""
    """Airflow run of the decision; a rollback tried again with the same one is not done twice."""
    verdict: str = ""
    """What the gate said: `passed` or `failed`; empty where no gate was asked."""


@dataclass(frozen=True)
class Review:
    """What a person decided in MLflow's own UI."""

    approved: bool
    by: str
    reason: str = ""


class RegistryConflict(RuntimeError):
    """The registry is not as it was when the evidence was made; nothing was changed."""


class ChampionChanged(RegistryConflict):
    """The champion is not the one that the candidate was compared with: the evidence is out of date."""


def register_candidate(model: str, files: CandidateFiles) -> Version:
    """Make the version (or find it, on a retry) and point the alias `candidate` at it.

    A retry moves the alias neither back from a newer candidate nor onto a version that was decided on.
    """
    if not files.run_id:
        raise RefusedError(f"candidate of {model}: it has no MLflow run; a version needs the run that made it")
    with mlflow_client() as client:
        _ensure_model(client, model)
        version = _find(client, model, files) or _create(client, model, files)
        pointed = _by_alias(client, model, CANDIDATE)
        if version.status == CANDIDATE and (pointed is None or int(pointed.version) < int(version.version)):
            client.set_registered_model_alias(model, CANDIDATE, version.version)
        return _read(client, model, version.version)


def read(model: str, alias_or_version: str) -> Version | None:
    """The version behind an alias or a number; None when there is none."""
    with mlflow_client() as client:
        return _by_number(client, model, alias_or_version) if alias_or_version.isdigit() else (
            _by_alias(client, model, alias_or_version))


def review_of(version: Version) -> Review | None:
    """What a person decided in MLflow's own UI: by the tag `review`, or by moving the alias `champion` here.

    Raises:
        RegistryConflict: the tag says something else than `approve` or `reject`.
    """
    said, _, reason = version.tags.get(REVIEW_TAG, "").partition(":")
    by = version.tags.get(REVIEWER_TAG, "").strip() or "a person in MLflow"
    match said.strip().lower():
        case "approve" | "reject" as verb:
            return Review(verb == "approve", by, reason.strip())
        case "":
            moved = CHAMPION in version.aliases and version.status != CHAMPION
            return Review(True, by, "the alias champion was moved by hand") if moved else None
    raise RegistryConflict(f"{version.label}: tag {REVIEW_TAG}={said.strip()[:80]!r} is neither `approve` nor `reject` "
                           "(`reject: why` is fine); mend it")


def describe(version: Version, text: str) -> None:
    """What a person reads on the version's page in MLflow: the evidence, before there is a decision. Idempotent."""
    with mlflow_client() as client:
        client.update_model_version(version.model, version.version, description=text[:LONGEST_TEXT])


def refuse_review(version: Version, reason: str) -> None:
    """Say on the version why a review made in MLflow was not followed. Idempotent."""
    with mlflow_client() as client:
        _tag(client, version, {REFUSED_TAG: reason[:LONGEST_TEXT]})


def check_base(candidate: Version, base: str) -> None:
    """Whether evidence against champion `base` (empty: there was none) still counts.

    Raises:
        ChampionChanged: the champion is neither that version nor the candidate.
    """
    with mlflow_client() as client:
        _check_base(candidate, _by_alias(client, candidate.model, CHAMPION), base)


def promote(candidate: Version, *, base: Version | None, files_hash: str, decision: Decision) -> Version:
    """Make `candidate` the champion; the champion of before becomes `previous_champion`. Idempotent.

    The alias `champion` moves in one request, before everything else: a kill at any point leaves the old champion or
    the new one, and a retry completes the rest.

    Args:
        candidate: the version whose evidence was judged.
        base: the champion it was compared with, None when there was none.
        files_hash: weights hash of the export's files now.
    Raises:
        ChampionChanged: the champion is neither `base` nor `candidate`.
        RegistryConflict: the files are not those evaluated, or the version was rejected (also by its tag `review`) or
            rolled back meanwhile.
    """
    with mlflow_client() as client:
        now, champion = _read(client, candidate.model, candidate.version), _by_alias(client, candidate.model, CHAMPION)
        _check_promotion(now, champion, base, candidate.weights_hash, files_hash)
        if champion is None or champion.version != now.version:
            client.set_registered_model_alias(now.model, CHAMPION, now.version)
            _check_moved(client, now)
        if base is not None and base.version != now.version:
            client.set_registered_model_alias(now.model, PREVIOUS, base.version)
            _tag(client, base, {STATUS: "replaced", "ratchet.replaced_by": now.version})
        _decide(client, now, CHAMPION, decision, {
            "ratchet.replaces": base.version if base else "", REFUSED_TAG: ""})
        _drop_alias(client, now, CANDIDATE)
        return _read(client, now.model, now.version)


def reject(candidate: Version, decision: Decision) -> None:
    """Keep the reason as tags, and take the alias `candidate` away if it still points here. Idempotent.

    An approval in MLflow that this overrules is refused with the reason, in the tag REFUSED_TAG.

    Raises:
        RegistryConflict: the version is the champion meanwhile; it stays that, with the reason in REFUSED_TAG.
    """
    with mlflow_client() as client:
        now = _read(client, candidate.model, candidate.version)
        if CHAMPION in now.aliases:
            refusal = (f"{now.label} is the champion and cannot be rejected; use rollback. It would have been, by "
                       f"{decision.by}: {decision.reason}")
            _tag(client, now, {REFUSED_TAG: refusal[:LONGEST_TEXT]})
            raise RegistryConflict(refusal)
        approved = now.tags.get(REVIEW_TAG, "").strip().lower().startswith("approve")
        refused = f"rejected by {decision.by}: {decision.reason}"[:LONGEST_TEXT] if approved else ""
        _decide(client, now, "rejected", decision, {REFUSED_TAG: refused})
        _drop_alias(client, now, CANDIDATE)


def rollback(model: str, decision: Decision, *, hash_files: Callable[[str], str], to: str | None = None) -> Version:
    """Point `champion` at `previous_champion` (or at version `to`) and mark the one left `rolled_back`.

    `previous_champion` then points at the version that the restored one had replaced, if there was one that was not
    itself rolled back. With the same `decision.url` it is done once.

    Args:
        decision: whose `url` is that of the Airflow run that does it.
        hash_files: the weights hash of an export's files now.
        to: a version that was champion before; None: `previous_champion`.
    Raises:
        RegistryConflict: there is no champion, nothing to go back to, the version was never champion, or its files
            are not those that were.
    """
    with mlflow_client() as client:
        left = _by_alias(client, model, CHAMPION)
        if left is None:
            raise RegistryConflict(f"{model} has no champion to roll back from")
        if decision.url and left.tags.get("ratchet.restored_by_run") == decision.url:
            target = left  # an earlier try of this rollback moved the alias; complete the rest
        else:
            target = _rollback_target(client, left, to)
            files = hash_files(target.export_uri) if target.export_uri else ""
            if not files or files != target.weights_hash:
                raise RegistryConflict(
                    f"{target.label}: its files have hash {files[:12]!r}, registered {target.weights_hash[:12]!r}; "
                    "roll back to a version whose files are there")
            # The notes first: after the alias has moved, a retry could not tell which version was left.
            _tag(client, target, {"ratchet.restored_by_run": decision.url, "ratchet.restored_from": left.version})
            _decide(client, left, "rolled_back", decision, {})
            client.set_registered_model_alias(model, CHAMPION, target.version)
        _tag(client, target, {STATUS: CHAMPION})
        older = _by_number(client, model, target.tags.get("ratchet.replaces", ""))
        if older is not None and older.status != "rolled_back":
            client.set_registered_model_alias(model, PREVIOUS, older.version)
        else:
            _drop_alias(client, _read(client, model, target.version), PREVIOUS)
        return _read(client, model, target.version)


def _rollback_target(client: Any, left: Version, to: str | None) -> Version:
    target = _by_number(client, left.model, to) if to else _by_alias(client, left.model, PREVIOUS)
    if target is None or target.version == left.version:
        wanted = f"version {to}" if to else f"alias {PREVIOUS}"
        raise RegistryConflict(f"{left.label}: nothing to roll back to ({wanted} is absent or the champion)")
    if target.status in (CANDIDATE, "rejected"):
        raise RegistryConflict(f"{target.label} was never champion (it is {target.status}); review it instead")
    return target


def _check_promotion(now: Version, champion: Version | None, base: Version | None, evaluated: str, files: str) -> None:
    if now.status in ("rejected", "rolled_back"):
        raise RegistryConflict(f"{now.label} was {now.status} by {now.tags.get('ratchet.decided_by', '?')}: "
                               f"{now.tags.get('ratchet.reason', '')}; register a new candidate")
    if not files or not evaluated == files == now.weights_hash:
        raise RegistryConflict(
            f"{now.label}: files have hash {files[:12]!r}, evaluated were {evaluated[:12]!r}, registered "
            f"{now.weights_hash[:12]!r}; evaluate the files that are there")
    _check_base(now, champion, base.version if base else "")
    moved = champion is not None and champion.version == now.version
    review = None if moved else review_of(now)
    if review is not None and not review.approved:
        raise RegistryConflict(f"{now.label}: {review.by} rejected it in MLflow by the tag {REVIEW_TAG}; to promote it "
                               "all the same, remove the tag and clear this task")


def _check_base(candidate: Version, champion: Version | None, base: str) -> None:
    current, expected = champion.version if champion else "none", base or "none"
    if current not in (expected, candidate.version):
        raise ChampionChanged(f"{candidate.label} was compared with champion {expected}, but the champion is {current} "
                              "now; review it again")


def _check_moved(client: Any, version: Version) -> None:
    # MLflow has no compare-and-set: a promotion at the same moment shows here.
    champion = _by_alias(client, version.model, CHAMPION)
    if champion is None or champion.version != version.version:
        current = champion.version if champion else "none"
        raise ChampionChanged(f"{version.label}: another promotion made {current} the champion at the same moment; "
                              "review it again")


def _ensure_model(client: Any, model: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(model)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _find(client: Any, model: str, files: CandidateFiles) -> Version | None:
    found = client.search_model_versions(f"name='{model}' and run_id='{files.run_id}'")
    same = [v for v in found if v.tags.get("ratchet.weights_hash") == files.weights_hash]
    return _read(client, model, min(same, key=lambda v: int(v.version)).version) if same else None


def _create(client: Any, model: str, files: CandidateFiles) -> Version:
    tags = {STATUS: CANDIDATE, "ratchet.export": files.export_uri, "ratchet.weights_hash": files.weights_hash,
            "ratchet.spec_hash": files.spec_hash, "ratchet.prompts_hash": files.prompts_hash,
            "ratchet.base": files.base, "ratchet.run": files.run_uri,
            **{clean_metric_name(f"eval.{name}"): f"{value:.6g}" for name, value in files.metrics.items()}}
    tags = {key: value for key, value in tags.items() if value}
    client.log_dict(files.run_id, tags, "model/version.json")
    made = client.create_model_version(model, source=f"runs:/{files.run_id}/model", run_id=files.run_id, tags=tags)
    return _version(made)


def _read(client: Any, model: str, number: str) -> Version:
    return _version(client.get_model_version(model, number))


def _by_number(client: Any, model: str, number: str) -> Version | None:
    return _absent_is_none(lambda: client.get_model_version(model, number)) if number else None


def _by_alias(client: Any, model: str, alias: str) -> Version | None:
    return _absent_is_none(lambda: client.get_model_version_by_alias(model, alias))


def _absent_is_none(get: Any) -> Version | None:
    from mlflow.exceptions import MlflowException

    try:
        return _version(get())
    except MlflowException as error:
        # An unknown alias is an invalid parameter to MLflow, an unknown model or number is absent.
        absent = error.error_code == "RESOURCE_DOES_NOT_EXIST" or (
            error.error_code == "INVALID_PARAMETER_VALUE" and "not found" in error.message)
        if absent:
            return None
        raise


def _version(found: Any) -> Version:
    tags = dict(found.tags)
    return Version(model=found.name, version=str(found.version), export_uri=tags.get("ratchet.export", ""),
                   weights_hash=tags.get("ratchet.weights_hash", ""), run_id=found.run_id or "", tags=tags,
                   aliases=tuple(found.aliases))


def _decide(client: Any, version: Version, status: str, decision: Decision, more: Mapping[str, str]) -> None:
    decided = {"ratchet.decided_by": decision.by, "ratchet.reason": decision.reason[:LONGEST_TEXT],
               "ratchet.decided_in": decision.url}
    if decision.verdict:
        decided["ratchet.gate"] = decision.verdict
    if version.status != status:  # a retry keeps the time of the decision
        decided["ratchet.decided_at"] = datetime.now(UTC).isoformat(timespec="seconds")
    if decision.gate:
        client.update_model_version(version.model, version.version, description=decision.gate[:LONGEST_TEXT])
    # The status last: where it is, the rest is.
    _tag(client, version, {**decided, **more, STATUS: status})


def _tag(client: Any, version: Version, tags: Mapping[str, str]) -> None:
    for key, value in tags.items():
        if version.tags.get(key, "") != value:
            client.set_model_version_tag(version.model, version.version, key, value)


def _drop_alias(client: Any, version: Version, alias: str) -> None:
    if alias in version.aliases:
        client.delete_registered_model_alias(version.model, alias)
