"""The planning of housekeeping: what may go, as properties over any facts."""

from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from tasks.retention import DAY_S, KINDS, Facts, Item, Policy, Reference, newest_runs, plan

NOW = 1_800_000_000.0
RUNS = [f"{dag}/r{number}" for dag in ("train_ppo", "review_candidate") for number in range(4)]
STAGES = ("stage_1", "stage_2")


def place(kind, run, stage):
    if kind == "jobs":
        return f"/home/jobs/{run}"
    if kind == "prompts":
        return f"s3://bucket/runs/{run}/prompts"
    return f"s3://bucket/runs/{run}/{stage}/{kind}" if run else f"s3://bucket/evaluations/{stage}"


def items():
    return st.builds(
        lambda kind, run, stage, size, days, leftover: Item(
            kind, place(kind, run if kind != "evaluations" else "", stage), run if kind != "evaluations" else "", size,
            NOW - days * DAY_S, leftover=leftover),
        st.sampled_from(KINDS), st.sampled_from(RUNS), st.sampled_from(STAGES), st.integers(0, 10**12),
        st.floats(0, 100), st.booleans())


def references():
    whole = st.builds(lambda item: item.uri, items())
    below = st.builds(lambda item: f"{item.uri}/step-000004", items())
    above = st.sampled_from([f"s3://bucket/runs/{run}" for run in RUNS])
    return st.builds(lambda uri: Reference(uri, "the champion"), whole | below | above)


FACTS = st.builds(
    lambda found, kept: Facts(tuple(found), tuple(kept), NOW),
    st.lists(items(), unique_by=lambda item: item.uri, max_size=20), st.lists(references(), max_size=5))
POLICIES = st.builds(
    lambda runs, days, what: Policy(runs, days, frozenset(what)),
    st.integers(0, 5), st.floats(0, 60), st.sets(st.sampled_from(KINDS)))


def deleted(facts, policy):
    return {action.item for action in plan(facts, policy) if action.delete}


def overlap(one, other):
    """An oracle of its own: by text, part by part."""
    a, b = one.split("/"), other.split("/")
    return a[: len(b)] == b[: len(a)]


@given(FACTS, POLICIES)
def test_every_item_gets_one_decision_with_a_reason(facts, policy):
    actions = plan(facts, policy)
    assert sorted(a.item.uri for a in actions) == sorted(i.uri for i in facts.items)
    assert all(action.reason for action in actions)


@given(FACTS, POLICIES)
def test_what_is_referenced_or_lies_above_or_below_it_is_never_deleted(facts, policy):
    for item in deleted(facts, policy):
        assert not any(overlap(item.uri, reference.uri) for reference in facts.references)


@given(FACTS, POLICIES)
def test_only_kinds_that_were_asked_for_go_beside_leftovers_and_nothing_young(facts, policy):
    for item in deleted(facts, policy):
        assert item.leftover or (item.kind in policy.what and NOW - item.modified >= policy.keep_days * DAY_S)


@given(FACTS, POLICIES)
def test_the_newest_runs_of_each_dag_keep_everything(facts, policy):
    last = {}
    for item in facts.items:
        if item.leftover:
            continue
        last[item.run] = max(last.get(item.run, 0), item.modified)
    for item in deleted(facts, policy):
        if item.run and not item.leftover:
            newer = [run for run in last if run.split("/")[0] == item.run.split("/")[0] and last[run] > last[item.run]]
            assert len(newer) >= policy.keep_runs or any(
                last[run] == last[item.run] for run in last if run and run != item.run)


@given(FACTS, POLICIES)
@example(
    Facts((Item("jobs", "/jobs/d/r0", "d/r0", 0, NOW), Item("jobs", "/jobs/d/r1", "d/r1", 0, NOW, leftover=True),
           Item("checkpoints", "/s/runs/d/r1/stage_1/checkpoints", "d/r1", 0, NOW - DAY_S)), (), NOW),
    Policy(0, 1.0, frozenset({"checkpoints"})))
def test_planning_again_after_the_deletions_deletes_nothing(facts, policy):
    gone = deleted(facts, policy)
    assert deleted(replace(facts, items=tuple(item for item in facts.items if item not in gone)), policy) == set()


@given(FACTS, POLICIES)
def test_a_deletion_that_was_interrupted_anywhere_is_completed_and_nothing_else_goes(facts, policy):
    gone = sorted(deleted(facts, policy), key=lambda item: item.uri)
    half = set(gone[: len(gone) // 2])
    left = replace(facts, items=tuple(item for item in facts.items if item not in half))
    assert deleted(left, policy) <= set(gone)


@given(FACTS, POLICIES, references())
def test_another_reference_only_keeps_more(facts, policy, reference):
    more = replace(facts, references=(*facts.references, reference))
    assert deleted(more, policy) <= deleted(facts, policy)


@given(FACTS, POLICIES)
def test_keeping_more_runs_or_days_deletes_less(facts, policy):
    for wider in (replace(policy, keep_runs=policy.keep_runs + 1), replace(policy, keep_days=policy.keep_days + 5)):
        assert deleted(facts, wider) <= deleted(facts, policy)


def test_a_place_that_only_begins_like_a_referenced_one_may_go():
    item = Item("exports", "/s/runs/d/r/stage_1/export", "d/r", 1, 0.0)
    facts = Facts((item,), (Reference("/s/runs/d/r/stage_1/export-2", "x"), Reference("/s/runs/d/r2", "x")), NOW)
    assert deleted(facts, Policy(0, 1)) == {item}


def test_an_old_run_is_deleted_with_the_reason_and_the_decision_about_its_version():
    old = Item("exports", "/s/runs/d/r/stage_1/export", "d/r", 1, NOW - 40 * DAY_S, "tiny/3", "rejected")
    [action] = plan(Facts((old,), (), NOW), Policy(0, 30))
    assert action.delete and action.reason == (
        "the run ended 40 days ago and is not among the newest 0; tiny/3 was rejected")


def test_newest_is_counted_for_each_dag_alone():
    assert newest_runs({"a/1": 1, "a/2": 2, "b/1": 0, "": 9}, 1) == {"a/2", "b/1"}
