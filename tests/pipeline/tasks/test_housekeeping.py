"""Housekeeping on a real store and registry: what is found, what is kept, and a deletion that is killed anywhere."""

import itertools
import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from airflow.sdk.exceptions import AirflowSkipException
from hypothesis import given
from hypothesis import strategies as st
from mlflow import MlflowClient

from engine import store
from engine.errors import FaultError
from tasks import deployment as place
from tasks import housekeeping, jobs, registry, registry_search, tracking
from tasks.inventory import ActiveRuns, Inventory
from tasks.launchers import local
from tasks.registry import CandidateFiles, Decision
from tasks.registry_search import EXPORT_DELETED
from tasks.retention import DAY_S, KINDS, Policy, plan
from tests.engine.s3_server import s3_server
from tests.pipeline.tasks.test_jobs import prepare_to

ALL = Policy(keep_runs=0, keep_days=30, what=frozenset(KINDS))
LATER = 40 * DAY_S
DECISION = Decision(by="ada", reason="a reason")
NAMES = (f"kept-{i}" for i in itertools.count())


class Scene:
    """A deployment with runs, as their tasks leave them, and what Airflow says of them."""

    def __init__(self):
        self.model = next(NAMES)
        self.active: set[tuple[str, str]] = set()

    def run(self, run_id, dag_id="train_ppo", base="/models/base", parts=("prompts", "checkpoints", "export")):
        """Files of a run with one stage; its root."""
        root = store.join(place.store(), "runs", dag_id, jobs.safe_name(run_id))
        store.write_bytes(store.join(root, "run.json"), json.dumps(
            {"dag_id": dag_id, "run_id": run_id, "base_model": base}))
        files = {"prompts": "prompts/manifest.json", "checkpoints": "stage_1/checkpoints/step-000004/manifest.json",
                 "export": "stage_1/export/model.safetensors"}
        for part in parts:
            store.write_bytes(store.join(root, files[part]), run_id * 10)
        return root

    def version(self, root):
        """The registered candidate of a run."""
        run = tracking.parent_run("registry", root, name="a run", lineage=tracking.Lineage())
        return registry.register_candidate(self.model, CandidateFiles(
            export_uri=f"{root}/stage_1/export", weights_hash=root, run_id=run.run_id, run_uri=root))

    def promote(self, version):
        base = registry.read(self.model, registry.CHAMPION)
        return registry.promote(version, base=base, files_hash=version.weights_hash, decision=DECISION)

    def count(self, dag_id, run_ids=None, states=None):
        """As Airflow's `get_dr_count`."""
        assert states == ["queued", "running"]
        return len([run for dag, run in self.active if dag == dag_id and (run_ids is None or run in run_ids)])

    @property
    def inventory(self):
        return Inventory(ActiveRuns(self.count))

    def plan(self, policy=ALL, later=LATER):
        facts, _ = self.inventory.facts(time.time() + later)
        # The registry is shared by all tests of the session.
        return [a for a in plan(facts, policy) if place.store() in a.item.uri or str(place.home()) in a.item.uri]

    def deletions(self, policy=ALL, later=LATER):
        """Planned deletions, relative to the store or the home."""
        return {relative(a.item.uri): a.reason for a in self.plan(policy, later) if a.delete}

    def delete(self, actions):
        return list(housekeeping.delete(actions, self.inventory))


def relative(uri):
    for base in (os.path.realpath(place.store()) if "://" not in place.store() else place.store(), str(place.home())):
        uri = uri.removeprefix(f"{base}/")
    return uri


@pytest.fixture
def scene(deployment, mlflow_uri):
    return Scene()


@pytest.fixture(params=["local", "s3"])
def any_scene(request, deployment, mlflow_uri, monkeypatch):
    if request.param == "local":
        yield Scene()
        return
    with s3_server(monkeypatch):
        monkeypatch.setenv("RATCHET_STORE", "s3://bucket/ratchet")
        yield Scene()


def test_what_aliases_and_undecided_versions_refer_to_is_kept_and_the_rest_goes(any_scene):
    scene = any_scene
    versions = {name: scene.version(scene.run(name)) for name in ("old", "previous", "champion", "rejected", "staging")}
    for name in ("old", "previous", "champion"):
        scene.promote(versions[name])
    registry.reject(versions["rejected"], DECISION)
    registry.reject(versions["staging"], DECISION)
    MlflowClient().set_registered_model_alias(scene.model, "staging", versions["staging"].version)
    for name in ("waiting", "undecided"):  # the first loses the alias `candidate` to the second
        scene.version(scene.run(name))
    scene.run("unregistered")
    found = scene.deletions()
    assert {uri.split("/")[2] for uri in found} == {"old", "rejected", "unregistered"}
    assert {uri.split("/", 3)[3] for uri in found if "/old/" in uri} == {
        "prompts", "stage_1/checkpoints", "stage_1/export"}
    assert f"{versions['old'].label} was replaced" in found["runs/train_ppo/old/stage_1/export"]
    assert f"{versions['rejected'].label} was rejected" in found["runs/train_ppo/rejected/stage_1/export"]
    assert "never registered" in found["runs/train_ppo/unregistered/stage_1/export"]

    scene.delete(scene.plan())
    left = {name.split("/")[1] for name in store.list_files(f"{place.store()}/runs") if not name.endswith("run.json")}
    assert left == {"previous", "champion", "staging", "waiting", "undecided"}
    assert store.exists(f"{place.store()}/runs/train_ppo/old/run.json"), "what a run was stays"
    assert EXPORT_DELETED in registry.read(scene.model, versions["old"].version).tags
    assert EXPORT_DELETED not in registry.read(scene.model, "champion").tags
    assert scene.deletions() == {}


def test_the_model_that_an_undecided_version_started_from_is_kept(scene):
    base = scene.run("base")
    first, second = scene.version(base), scene.version(scene.run("next", base=f"{base}/stage_1/export"))
    registry.reject(first, DECISION)
    assert "runs/train_ppo/base/stage_1/export" not in scene.deletions()
    registry.reject(second, DECISION)
    assert "runs/train_ppo/base/stage_1/export" in scene.deletions()


def test_runs_that_have_not_ended_are_kept_with_what_they_started_from(scene):
    base = scene.run("base")
    scene.run("manual__2026-01-01T00:00:00+00:00", base=f"{base}/stage_1/export")
    scene.run("ended")
    scene.active = {("train_ppo", "manual__2026-01-01T00:00:00+00:00")}
    found = set(scene.deletions())
    assert {uri.split("/")[2] for uri in found} == {"base", "ended"}
    assert "runs/train_ppo/base/stage_1/export" not in found and "runs/train_ppo/base/prompts" in found


def test_a_job_directory_without_a_name_is_kept_while_its_dag_has_any_active_run(scene):
    for name, ids in (("a", None), ("b", {"dag_id": "review_candidate", "run_id": "b", "task_id": "evaluate"})):
        directory = jobs.job_directory(place.home(), "review_candidate", name, "evaluate")
        jobs.note_task(directory, **(ids or {}))
        (directory / "spec.json").write_text("{}")
    scene.active = {("review_candidate", "c")}
    assert set(scene.deletions()) == {"jobs/review_candidate/b"}
    scene.active = set()
    assert set(scene.deletions()) == {"jobs/review_candidate/a", "jobs/review_candidate/b"}


def test_a_running_job_and_what_its_spec_names_are_kept(scene, deployment):
    deployment.plan({"t": [{"seconds": 600}]})
    root = scene.run("old")
    directory = jobs.job_directory(place.home(), "other_dag", "r", "t")
    jobs.submit(directory, prepare_to(Path(root, "prompts")), local)
    assert set(scene.deletions()) == {"runs/train_ppo/old/stage_1/checkpoints", "runs/train_ppo/old/stage_1/export"}
    jobs.kill(directory, local)
    assert {"jobs/other_dag/r", "runs/train_ppo/old/prompts"} <= set(scene.deletions())


def test_a_version_that_was_decided_on_lately_keeps_its_run_however_old_the_files_are(scene):
    roots = {name: scene.run(name) for name in ("unregistered", "rejected", "replaced", "champion")}
    for root in roots.values():
        for path in Path(root).rglob("*"):
            os.utime(path, (time.time() - LATER,) * 2)
    versions = {name: scene.version(roots[name]) for name in ("rejected", "replaced", "champion")}
    registry.reject(versions["rejected"], DECISION)
    first = scene.promote(versions["replaced"])
    scene.promote(versions["champion"])
    MlflowClient().delete_registered_model_alias(scene.model, registry.PREVIOUS)
    # Long in production: its own promotion is as old as its files.
    MlflowClient().set_model_version_tag(scene.model, first.version, "ratchet.decided_at", "2020-01-01T00:00:00+00:00")
    assert {uri.split("/")[2] for uri in scene.deletions(later=0)} == {"unregistered"}
    assert {uri.split("/")[2] for uri in scene.deletions()} == {"unregistered", "rejected", "replaced"}


def test_a_version_that_spells_the_store_by_a_link_is_found(scene, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path / "store")
    root = scene.run("old")
    scene.version(root.replace("/store/", "/link/"))
    assert scene.deletions() == {}
    monkeypatch.setenv("RATCHET_STORE", str(tmp_path / "link"))
    assert scene.deletions() == {}


def test_a_file_that_names_others_and_cannot_be_read_stops_everything(scene):
    root = scene.run("old")
    scene.version(root)
    Path(root, "run.json").write_text("{torn")
    with pytest.raises(FaultError, match=r"old/run\.json: not JSON .* nothing is deleted"):
        scene.deletions()


def test_without_the_registry_nothing_is_deleted(scene, monkeypatch):
    root = scene.run("old")
    actions = scene.plan()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(FaultError, match="does not answer|failed"):
        scene.delete(actions)
    assert len(store.list_files(root)) == 4


def test_a_promotion_between_the_plan_and_the_deletion_keeps_the_files(scene):
    first = scene.version(scene.run("first"))
    registry.reject(first, DECISION)
    actions = scene.plan()
    assert {a.item.kind for a in actions if a.delete} == {"exports", "checkpoints", "prompts"}
    MlflowClient().set_registered_model_alias(scene.model, "champion", first.version)
    outcomes = scene.delete(actions)
    assert not any(outcome.deleted for outcome in outcomes)
    assert all(f"kept after all: champion of {first.label}" in outcome.reason for outcome in outcomes)
    assert len(store.list_files(f"{place.store()}/runs/train_ppo/first")) == 4
    assert EXPORT_DELETED not in registry.read(scene.model, first.version).tags


def test_the_mark_is_set_before_the_last_look(scene, monkeypatch):
    """Who moves an alias and then reads the mark, and who sets the mark and then reads the alias, cannot miss each
    other: this is the second half."""
    first = scene.version(scene.run("first", parts=("export",)))
    registry.reject(first, DECISION)
    inventory, marks = scene.inventory, []
    look = inventory.references

    def watched():
        marks.append(registry.read(scene.model, first.version).tags.get(EXPORT_DELETED, ""))
        return look()

    inventory.references = watched
    list(housekeeping.delete(scene.plan(), inventory))
    assert len(marks) == 1 and marks[0]


def test_a_job_that_begins_between_the_plan_and_the_deletion_keeps_its_directory(scene, deployment, monkeypatch):
    directory = jobs.job_directory(place.home(), "train_ppo", "r", "t")
    jobs.submit(directory, prepare_to(place.home() / "elsewhere"), local)
    while jobs.state_of(directory, local).phase == "running":
        time.sleep(0.05)
    actions = scene.plan()
    deployment.plan({"t": [{"seconds": 600}]})
    shutil.rmtree(directory)
    jobs.submit(directory, prepare_to(place.home() / "elsewhere"), local)
    # Even when the last look was a moment too early.
    monkeypatch.setattr(Inventory, "references", lambda self: ())
    [outcome] = scene.delete(actions)
    assert (outcome.deleted, outcome.reason) == (False, "kept after all: a job runs in it")
    assert jobs.state_of(directory, local).phase == "running"


class _Killed(BaseException):
    pass


def _killed_at(monkeypatch, number):
    """Dies before its operation `number` on the disk or the registry."""
    left = [number]
    targets = [(os, name) for name in ("rename", "unlink", "rmdir")] + [
        (MlflowClient, "set_model_version_tag"), (MlflowClient, "delete_model_version_tag")]
    for owner, name in targets:
        original = getattr(owner, name)

        def fragile(*arguments, original=original, **named):
            if left[0] == 0:
                raise _Killed
            left[0] -= 1
            return original(*arguments, **named)

        monkeypatch.setattr(owner, name, fragile)


def test_killed_anywhere_a_deletion_leaves_no_half_and_the_next_one_completes_it(scene, monkeypatch):
    ends, kills = [], 0
    for number in range(100):
        root = scene.run("old")
        directory = jobs.job_directory(place.home(), "train_ppo", "old", "stage_1.train")
        jobs.note_task(directory, dag_id="train_ppo", run_id="old", task_id="stage_1.train")
        for name in ("spec.json", "submit.lock", "log.txt"):
            (directory / name).write_text("{}")
        whole = {item: store.hash_dir(item) for item in (
            f"{root}/prompts", f"{root}/stage_1/checkpoints", f"{root}/stage_1/export", str(directory))}
        with monkeypatch.context() as fragile:
            actions = scene.plan()
            _killed_at(fragile, number)
            try:
                scene.delete(actions)
                died = False
            except _Killed:
                died, kills = True, kills + 1
        for item, digest in whole.items():
            assert not os.path.exists(item) or store.hash_dir(item) == digest, f"half of {item} after {number}"
        scene.delete(scene.plan())
        assert scene.deletions() == {}
        ends.append(sorted(store.list_files(place.store())))
        if not died:
            break
    assert kills > 8 and all(end == ["runs/train_ppo/old/run.json"] for end in ends)


def test_the_mark_of_a_killed_deletion_goes_when_the_version_is_in_use_again(scene, monkeypatch):
    versions = [scene.version(scene.run(name, parts=("export",))) for name in ("used", "unused")]
    for version in versions:
        registry.reject(version, DECISION)
    given_ = context(scene, dry_run=False)
    housekeeping.look(**given_)
    with monkeypatch.context() as fragile, pytest.raises(_Killed):
        fragile.setattr(housekeeping, "remove", lambda item: (_ for _ in ()).throw(_Killed()))
        housekeeping.carry_out(**given_)
    registry_search.mark_deleted(versions[0].label, "now")  # whichever of them was first
    MlflowClient().set_registered_model_alias(scene.model, "champion", versions[0].version)
    done = housekeeping.carry_out(**given_)
    used, unused = (registry.read(scene.model, version.version) for version in versions)
    assert done["deleted"] == 1 and store.exists(used.export_uri) and not store.exists(unused.export_uri)
    assert EXPORT_DELETED not in used.tags and EXPORT_DELETED in unused.tags


def test_what_a_run_cost_is_known_after_its_jobs_were_deleted(scene):
    root = scene.run("old")
    for task, seconds in (("prepare", 0.0), ("stage_1.train", 7200.0), ("stage_1.evaluate", 1800.0)):
        directory = jobs.job_directory(place.home(), "train_ppo", "old", task)
        jobs.note_task(directory, dag_id="train_ppo", run_id="old", task_id=task)
        (directory / "spec.json").write_text("{}")
        (directory / "result.json").write_text(json.dumps({"stage": "x", "gpu_seconds": seconds}))
    usage = housekeeping.note_usage(scene.inventory.runs())
    before = sum(os.path.getsize(f"{root}/{name}") for name in store.list_files(root)) + sum(
        path.stat().st_size for path in Path(place.home(), "jobs").rglob("*") if path.is_file())
    assert sum(usage["train_ppo/old"]["bytes"].values()) == before
    scene.delete(scene.plan())
    usage = housekeeping.note_usage(scene.inventory.runs())
    assert usage["train_ppo/old"]["gpu_seconds"] == 9000.0
    assert sum(usage["train_ppo/old"]["bytes"].values()) == os.path.getsize(f"{root}/run.json")
    assert "| 2.50 |" in housekeeping.usage_table(usage)


def context(scene, **params):
    pushed = {}
    ti = SimpleNamespace(run_id="weekly", get_dr_count=scene.count,
                         xcom_push=lambda key, value: pushed.update({key: value}))
    defaults = {"dry_run": True, "keep_runs": 0, "keep_days": 0, "what": list(KINDS)}
    return {"ti": ti, "params": defaults | params, "pushed": pushed}


def test_a_dry_run_lists_with_size_and_reason_and_touches_nothing(any_scene):
    scene = any_scene
    root = scene.run("old")
    before = store.list_files(place.store())
    given_ = context(scene)
    found = housekeeping.look(**given_)
    with pytest.raises(AirflowSkipException, match=r"nothing was deleted; .*report\.md"):
        housekeeping.carry_out(**given_)
    assert [name for name in store.list_files(place.store()) if not name.startswith("housekeeping/")] == before
    assert found["to_delete"] == 3 and found["bytes"] == 3 * len("old" * 10)
    report = store.read_text(found["report"])
    assert f"| exports | {root}/stage_1/export | 30 B | the run ended 0 days ago" in report
    assert "3 items, 90 B" in report and "| train_ppo/old |" in report and "GPU-hours" in given_["pushed"]["table"]


def test_what_was_listed_is_what_is_deleted_and_a_second_try_ends_the_same(any_scene):
    scene = any_scene
    root = scene.run("old")
    given_ = context(scene, dry_run=False, what=["checkpoints", "exports"])
    housekeeping.look(**given_)
    late = scene.run("late")
    done = housekeeping.carry_out(**given_)
    assert (done["deleted"], done["bytes"]) == (2, 60)
    assert store.list_files(root) == ["prompts/manifest.json", "run.json"]
    assert len(store.list_files(late)) == 4, "not on the list"
    again = housekeeping.carry_out(**given_)
    assert again["deleted"] == 2 and "Deleted" in store.read_text(again["report"])


@given(st.sets(st.integers(0, 200)), st.lists(st.integers(0, 200), unique=True))
def test_active_runs_are_found_by_counting(running, asked):
    def count(dag_id, run_ids=None, states=None):
        return len(running if run_ids is None else [run for run in run_ids if int(run) in running])

    found = ActiveRuns(count)
    assert found.among("d", [str(run) for run in asked]) == {str(run) for run in asked if run in running}
    assert found.any("d") == bool(running)


@pytest.mark.parametrize(("count", "shown"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2 * 10**9, "2 GB"),
                                              (3 * 10**12, "3 TB")])
def test_sizes_are_shown_for_a_person(count, shown):
    assert housekeeping.size(count) == shown
