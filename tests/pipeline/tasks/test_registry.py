"""The registry: versions, aliases, promotion and rollback against a real MLflow server."""

import itertools
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from mlflow import MlflowClient

from engine.errors import RefusedError
from tasks import registry, tracking
from tasks.registry import (
    CANDIDATE,
    CHAMPION,
    PREVIOUS,
    REFUSED_TAG,
    CandidateFiles,
    ChampionChanged,
    Decision,
    RegistryConflict,
    Review,
)

DECISION = Decision(by="ada", reason="better on sums", gate="**Gate passed**", url="review/1", verdict="passed")
NAMES = (f"model-{i}" for i in itertools.count())


@pytest.fixture
def client(mlflow_uri):
    return MlflowClient(tracking_uri=mlflow_uri, registry_uri=mlflow_uri)


@pytest.fixture
def model(client):
    return next(NAMES)


def _files(model, number):
    run = tracking.parent_run("registry", f"{model}/{number}", name="a run", lineage=tracking.Lineage())
    return CandidateFiles(export_uri=f"/exports/{number}", weights_hash=f"hash {number}", run_id=run.run_id,
                          run_uri=f"/runs/{number}", metrics={"mean_reward": 0.25, "mean@1": 1.0})


def _candidate(model, number):
    return registry.register_candidate(model, _files(model, number))


def _promote(version, base, **changes):
    arguments = {"base": base, "files_hash": version.weights_hash, "decision": DECISION, **changes}
    return registry.promote(version, **arguments)


def _hash(export_uri):
    """What the files of `/exports/N` have as hash."""
    return f"hash {export_uri.rsplit('/', 1)[-1]}"


def _rollback(model, decision=DECISION, hash_files=_hash, **changes):
    return registry.rollback(model, decision, hash_files=hash_files, **changes)


def _aliases(model):
    found = {alias: registry.read(model, alias) for alias in (CANDIDATE, CHAMPION, PREVIOUS)}
    return {alias: version.version for alias, version in found.items() if version}


def _champions(model, count):
    """`count` versions promoted one after another."""
    base = None
    for number in range(1, count + 1):
        base = _promote(_candidate(model, number), base)
    return base


def test_a_candidate_carries_what_it_is_made_of_and_a_retry_finds_it(client, model):
    version = _candidate(model, 1)
    assert (version.label, version.export_uri, version.weights_hash) == (f"{model}/1", "/exports/1", "hash 1")
    assert version.tags["ratchet.run"] == "/runs/1" and version.tags["eval.mean_reward"] == "0.25"
    assert version.aliases == (CANDIDATE,)
    assert _candidate(model, 1) == version
    assert len(client.search_model_versions(f"name='{model}'")) == 1
    assert "version.json" in client.list_artifacts(version.run_id, "model")[0].path


def test_other_weights_of_the_same_run_are_another_version(client, model):
    first = _candidate(model, 1)
    second = registry.register_candidate(model, replace(_files(model, 1), weights_hash="other"))
    assert (first.version, second.version) == ("1", "2") and _aliases(model) == {CANDIDATE: "2"}


def test_a_late_retry_takes_the_alias_neither_from_a_newer_candidate_nor_back_to_a_decided_one(model, client):
    _candidate(model, 1)
    second = _candidate(model, 2)
    _candidate(model, 1)
    assert _aliases(model) == {CANDIDATE: "2"}
    registry.reject(second, DECISION)
    _candidate(model, 2)
    assert _aliases(model) == {}


def test_a_candidate_without_a_run_is_refused(client, model):
    with pytest.raises(RefusedError, match="has no MLflow run"):
        registry.register_candidate(model, replace(_files(model, 1), run_id=""))


def test_reading_what_is_not_there_gives_none(client, model):
    assert registry.read(model, CHAMPION) is None and registry.read(model, "7") is None
    _candidate(model, 1)
    assert registry.read(model, CHAMPION) is None and registry.read(model, "7") is None


def test_promotion_moves_the_aliases_and_keeps_who_why_and_the_gate(client, model):
    first = _promote(_candidate(model, 1), None)
    second = _promote(_candidate(model, 2), first)
    assert _aliases(model) == {CHAMPION: "2", PREVIOUS: "1"}
    assert second.status == "champion" and registry.read(model, "1").status == "replaced"
    assert second.tags["ratchet.decided_by"] == "ada" and second.tags["ratchet.reason"] == "better on sums"
    assert second.tags["ratchet.gate"] == "passed" and second.tags["ratchet.decided_in"] == "review/1"
    assert datetime.fromisoformat(second.tags["ratchet.decided_at"]) <= datetime.now(UTC)
    assert client.get_model_version(model, "2").description == "**Gate passed**"


def test_promoting_twice_changes_nothing(client, model):
    first = _promote(_candidate(model, 1), None)
    candidate = _candidate(model, 2)
    done = _promote(candidate, first)
    assert _promote(candidate, first) == done
    assert _aliases(model) == {CHAMPION: "2", PREVIOUS: "1"}


class _Killed(BaseException):
    pass


def _killed_after(monkeypatch, writes):
    """The client dies at its write number `writes` + 1, wherever that is."""
    left = [writes]

    def fragile(original):
        def call(*arguments, **named):
            if left[0] == 0:
                raise _Killed
            left[0] -= 1
            return original(*arguments, **named)
        return call

    for name in ("set_registered_model_alias", "delete_registered_model_alias", "set_model_version_tag",
                 "update_model_version"):
        monkeypatch.setattr(MlflowClient, name, fragile(getattr(MlflowClient, name)))


def _end_state(client, model):
    """Aliases and tags, without the time of the decision."""
    tags = {v.version: {k: t for k, t in v.tags.items() if k != "ratchet.decided_at"}
            for v in client.search_model_versions(f"name='{model}'")}
    return _aliases(model), tags


@pytest.fixture
def direct_client(tmp_path, monkeypatch):
    """MLflow on its database without the server between: hundreds of calls in seconds."""
    monkeypatch.chdir(tmp_path)  # artifacts go below the working directory
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


@pytest.mark.slow
@pytest.mark.parametrize("act", ["promote", "rollback"])
def test_killed_after_any_write_and_tried_again_it_ends_in_the_same_state(direct_client, act):
    states, champions = [], set()
    for writes in [1000, *range(12)]:
        model = next(NAMES)
        base = _champions(model, 2)
        candidate = _candidate(model, 3) if act == "promote" else None

        def run(model=model, base=base, candidate=candidate):
            return _promote(candidate, base) if candidate else _rollback(model, DECISION)

        with pytest.MonkeyPatch.context() as patch:
            _killed_after(patch, writes)
            try:
                run()
            except _Killed:
                champions.add(registry.read(model, CHAMPION).version)
        run()
        states.append(_end_state(direct_client, model))
    assert all(state == states[0] for state in states)
    assert champions == ({"2", "3"} if act == "promote" else {"1", "2"})  # some kills fell before the move, some after


def test_files_that_changed_after_the_evaluation_are_not_promoted(client, model):
    first = _promote(_candidate(model, 1), None)
    candidate = _candidate(model, 2)
    for changes in ({"files_hash": "hash of changed files"}, {"files_hash": ""}):
        with pytest.raises(RegistryConflict, match="evaluate the files that are there"):
            _promote(candidate, first, **changes)
    client.set_model_version_tag(model, "2", "ratchet.weights_hash", "changed behind our back")
    with pytest.raises(RegistryConflict, match="registered 'changed behi'"):
        _promote(candidate, first)
    assert _aliases(model) == {CANDIDATE: "2", CHAMPION: "1"}


def test_of_two_candidates_compared_with_one_champion_only_the_first_is_promoted(client, model):
    first = _promote(_candidate(model, 1), None)
    second, third = _candidate(model, 2), _candidate(model, 3)
    _promote(second, first)
    with pytest.raises(ChampionChanged, match="compared with champion 1, but the champion is 2 now; review it again"):
        _promote(third, first)
    assert _aliases(model) == {CANDIDATE: "3", CHAMPION: "2", PREVIOUS: "1"}


def test_a_champion_set_by_hand_is_not_overwritten_silently(client, model):
    candidate = _candidate(model, 1)
    _candidate(model, 2)
    client.set_registered_model_alias(model, CHAMPION, "2")
    with pytest.raises(RegistryConflict, match="compared with champion none, but the champion is 2 now"):
        _promote(candidate, None)


def test_a_promotion_made_by_hand_is_completed(client, model):
    first = _promote(_candidate(model, 1), None)
    candidate = _candidate(model, 2)
    client.set_registered_model_alias(model, CHAMPION, "2")
    assert _promote(candidate, first).status == "champion"
    assert _aliases(model) == {CHAMPION: "2", PREVIOUS: "1"}


def test_rejection_keeps_the_reason_and_a_rejected_version_is_not_promoted(client, model):
    first = _promote(_candidate(model, 1), None)
    candidate = _candidate(model, 2)
    decision = Decision(by="gate", reason="mean_reward did not rise", gate="**Gate failed**")
    registry.reject(candidate, decision)
    registry.reject(candidate, decision)
    rejected = registry.read(model, "2")
    assert rejected.status == "rejected" and rejected.tags["ratchet.reason"] == "mean_reward did not rise"
    assert _aliases(model) == {CHAMPION: "1"}
    with pytest.raises(RegistryConflict, match="was rejected by gate: mean_reward did not rise"):
        _promote(candidate, first)
    with pytest.raises(RegistryConflict, match="is the champion and cannot be rejected"):
        registry.reject(first, decision)


def test_rollback_goes_back_one_champion_at_a_time_and_never_to_one_that_was_rolled_back(client, model):
    _champions(model, 3)
    assert _rollback(model, replace(DECISION, url="rollback/1")).version == "2"
    assert _aliases(model) == {CHAMPION: "2", PREVIOUS: "1"}
    assert registry.read(model, "3").status == "rolled_back"
    assert _rollback(model, replace(DECISION, url="rollback/2")).version == "1"
    assert _aliases(model) == {CHAMPION: "1"}
    with pytest.raises(RegistryConflict, match="nothing to roll back to"):
        _rollback(model, replace(DECISION, url="rollback/3"))


def test_a_rolled_back_version_is_not_promoted_by_a_late_retry_of_its_review(client, model):
    first = _promote(_candidate(model, 1), None)
    candidate = _candidate(model, 2)
    _promote(candidate, first)
    _rollback(model, replace(DECISION, url="rollback/1"))
    with pytest.raises(RegistryConflict, match="was rolled_back by ada"):
        _promote(candidate, first)
    assert _aliases(model) == {CHAMPION: "1"}


def test_rollback_to_a_named_version(client, model):
    _champions(model, 3)
    assert _rollback(model, DECISION, to="1").version == "1"
    with pytest.raises(RegistryConflict, match="version 9 is absent"):
        _rollback(model, replace(DECISION, url="other"), to="9")
    with pytest.raises(RegistryConflict, match="has no champion"):
        _rollback(f"{model}-unknown", DECISION)


def test_a_version_that_was_never_champion_or_whose_files_changed_is_not_rolled_back_to(client, model):
    _champions(model, 2)
    candidate = _candidate(model, 3)
    with pytest.raises(RegistryConflict, match=r"/3 was never champion \(it is candidate\); review it instead"):
        _rollback(model, to="3")
    registry.reject(candidate, DECISION)
    with pytest.raises(RegistryConflict, match="it is rejected"):
        _rollback(model, to="3")
    for wrong in (lambda uri: "others", lambda uri: ""):
        with pytest.raises(RegistryConflict, match="whose files are there"):
            _rollback(model, hash_files=wrong)
    client.delete_model_version_tag(model, "1", "ratchet.export")
    with pytest.raises(RegistryConflict, match="whose files are there"):
        _rollback(model)
    assert _aliases(model) == {CHAMPION: "2", PREVIOUS: "1"} and registry.read(model, "2").status == "champion"


@pytest.mark.parametrize(("tags", "review"), [
    ({"review": " Approve "}, Review(True, "a person in MLflow")),
    ({"review": "approve", "reviewer": "ada"}, Review(True, "ada")),
    ({"review": "Reject: rambles: twice", "reviewer": " "}, Review(False, "a person in MLflow", "rambles: twice")),
])
def test_what_a_person_decides_in_mlflow_by_tag_is_read(client, model, tags, review):
    _candidate(model, 1)
    assert registry.review_of(registry.read(model, "1")) is None
    for key, value in tags.items():
        client.set_model_version_tag(model, "1", key, value)
    assert registry.review_of(registry.read(model, "1")) == review


def test_nonsense_in_the_tag_is_refused(client, model):
    _candidate(model, 1)
    for nonsense in ("maybe", "approved", "approve it", "yes: approve"):
        client.set_model_version_tag(model, "1", "review", nonsense)
        with pytest.raises(RegistryConflict, match=f"'{nonsense.split(':')[0]}' is neither"):
            registry.review_of(registry.read(model, "1"))


def test_the_alias_champion_moved_by_hand_is_an_approval_and_a_promotion_is_not(client, model):
    first = _candidate(model, 1)
    client.set_registered_model_alias(model, CHAMPION, "1")
    assert registry.review_of(registry.read(model, "1")).reason == "the alias champion was moved by hand"
    _promote(first, None)
    assert registry.review_of(registry.read(model, "1")) is None


def test_evidence_counts_while_the_champion_is_the_one_compared_with_or_the_candidate(client, model):
    candidate = _candidate(model, 1)
    registry.check_base(candidate, "")
    with pytest.raises(ChampionChanged, match="compared with champion 7, but the champion is none now"):
        registry.check_base(candidate, "7")
    _promote(candidate, None)
    registry.check_base(candidate, "")
    registry.check_base(_candidate(model, 2), "1")
    with pytest.raises(ChampionChanged, match="compared with champion none, but the champion is 1 now"):
        registry.check_base(registry.read(model, "2"), "")


def test_a_rejection_in_mlflow_stops_a_promotion_that_was_approved_elsewhere(client, model):
    candidate = _candidate(model, 1)
    client.set_model_version_tag(model, "1", "review", "reject")
    with pytest.raises(RegistryConflict, match="rejected it in MLflow by the tag review; to promote it all the same"):
        _promote(candidate, None)
    assert _aliases(model) == {CANDIDATE: "1"}
    client.delete_model_version_tag(model, "1", "review")
    assert _promote(candidate, None).status == "champion"


def test_an_approval_in_mlflow_that_is_overruled_gets_the_reason(client, model):
    candidate = _candidate(model, 1)
    client.set_model_version_tag(model, "1", "review", "approve")
    registry.reject(candidate, Decision(by="gate", reason="mean_reward did not rise", verdict="failed"))
    rejected = registry.read(model, "1")
    assert rejected.tags[REFUSED_TAG] == "rejected by gate: mean_reward did not rise"
    assert rejected.tags["ratchet.gate"] == "failed" and _aliases(model) == {}


def test_a_champion_set_by_hand_that_the_gate_refused_stays_and_says_so(client, model):
    candidate = _candidate(model, 1)
    client.set_registered_model_alias(model, CHAMPION, "1")
    with pytest.raises(RegistryConflict, match="use rollback"):
        registry.reject(candidate, Decision(by="gate", reason="it is worse"))
    assert "by gate: it is worse" in registry.read(model, "1").tags[REFUSED_TAG]
    assert _aliases(model) == {CANDIDATE: "1", CHAMPION: "1"}


def test_a_promotion_clears_an_earlier_refusal_and_long_texts_fit_the_database(client, model):
    candidate = _candidate(model, 1)
    registry.refuse_review(candidate, "x" * 6000)
    assert len(registry.read(model, "1").tags[REFUSED_TAG]) == 5000
    registry.describe(candidate, "y" * 6000)
    assert len(client.get_model_version(model, "1").description) == 5000
    promoted = _promote(candidate, None, decision=Decision(by="ada", reason="r" * 6000, gate="z" * 6000))
    assert promoted.tags[REFUSED_TAG] == "" and len(promoted.tags["ratchet.reason"]) == 5000
    assert client.get_model_version(model, "1").description == "z" * 5000
