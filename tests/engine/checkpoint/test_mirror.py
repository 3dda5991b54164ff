"""Checkpoints in an object store: there whole or not at all, found by a machine that never saw them."""

import json
import shutil
from contextlib import contextmanager

import boto3
import pytest

from engine import store
from engine.checkpoint.files import CheckpointFiles
from engine.checkpoint.mirror import Mirror
from engine.errors import StoreError
from engine.fence import FencedError
from engine.spec.train import KeepBest
from tests.engine.checkpoint.test_files import commit, steps
from tests.engine.multiprocess import shared_ranks
from tests.engine.s3_server import s3_server

PREFIX = "s3://bucket/run/checkpoints"


@pytest.fixture
def server(monkeypatch):
    with s3_server(monkeypatch) as server:
        yield server


def mirrored(directory, **options):
    return CheckpointFiles(directory, mirror=Mirror(PREFIX), **options)


def whole():
    return [int(name.removeprefix("step-")) for name in Mirror(PREFIX).names()]


def test_a_machine_that_never_saw_the_checkpoints_goes_on_from_the_newest(server, tmp_path):
    files = mirrored(tmp_path / "first", keep_last=2)
    for step in (1, 2, 3):
        commit(files, step)
    assert whole() == steps(tmp_path / "first") == [2, 3]
    assert store.read_text(f"{PREFIX}/latest.json") == (tmp_path / "first" / "latest.json").read_text()
    found, manifest = mirrored(tmp_path / "second").find()
    assert found == tmp_path / "second" / "step-000003" and manifest["step"] == 3
    assert store.hash_dir(found) == store.hash_dir(tmp_path / "first" / "step-000003")


def test_another_job_resumes_from_a_uri(server, tmp_path):
    commit(mirrored(tmp_path / "first"), 7)
    other = CheckpointFiles(tmp_path / "job" / "checkpoints")
    for source in (PREFIX, f"{PREFIX}/step-000007"):
        found, _ = other.find(source)
        assert found == tmp_path / "job" / "resumed" / "step-000007" and (found / "actor" / "weights").exists()
        shutil.rmtree(tmp_path / "job")
    assert other.find(f"{PREFIX}/step-000008") is None


@pytest.mark.parametrize("part", ["/weights", "/manifest.json"])
def test_an_upload_that_fails_leaves_the_one_before_and_the_next_try_ends_it(server, tmp_path, part):
    files = mirrored(tmp_path / "first", keep_last=1)
    commit(files, 1)
    server.fault = lambda request: "403" if request["PATH_INFO"].endswith(f"step-000002{part}") or request[
        "PATH_INFO"].endswith(f"step-000002/actor{part}") else None
    with pytest.raises(StoreError, match="AccessDenied"):
        commit(files, 2)
    server.fault = None
    assert whole() == [1]
    assert mirrored(tmp_path / "second").find()[1]["step"] == 1
    commit(files, 2)
    assert whole() == [2]


def test_a_damaged_local_checkpoint_is_fetched_and_a_damaged_object_is_passed_over(server, tmp_path):
    warnings = []
    files = mirrored(tmp_path / "first", warn=warnings.append)
    for step in (1, 2):
        commit(files, step)
    (tmp_path / "first" / "step-000002" / "state.json").write_text("{}")
    assert files.find()[1]["step"] == 2 and not warnings
    key = "run/checkpoints/step-000002/actor/weights"
    metadata = boto3.client("s3").head_object(Bucket="bucket", Key=key)["Metadata"]
    boto3.client("s3").put_object(Bucket="bucket", Key=key, Body=b"other", Metadata=metadata)
    assert mirrored(tmp_path / "second", warn=warnings.append).find()[1]["step"] == 1
    assert len(warnings) == 1 and "step-000002 is not whole: download" in warnings[0] and "sha256" in warnings[0]


def test_a_store_that_does_not_answer_is_a_fault_and_not_a_fresh_start(server, tmp_path):
    commit(mirrored(tmp_path / "first"), 1)
    server.fault = lambda request: "403"
    with pytest.raises(StoreError):
        mirrored(tmp_path / "second").find()


def test_the_best_is_kept_by_a_machine_that_never_saw_it(server, tmp_path):
    best = KeepBest(metric="r")
    commit(mirrored(tmp_path / "first", keep_last=1, keep_best=best), 1, r=0.9)
    second = mirrored(tmp_path / "second", keep_last=1, keep_best=best)
    second.find()
    for step in (2, 3):
        commit(second, step, r=0.1)
    assert whole() == [1, 3] and second.best == "step-000001"


class Replaced:
    """A guard of an attempt that was replaced as soon as `at` is true."""

    def __init__(self, at=True):
        self.at = at

    @contextmanager
    def __call__(self):
        if self.at:
            raise FencedError("attempt 2 has taken over")
        yield


def test_an_attempt_that_was_replaced_makes_nothing_visible(server, tmp_path):
    guard = Replaced(at=False)
    files = mirrored(tmp_path / "old", guard=guard)
    saving = files.prepare(1, ["actor"])
    guard.at = True
    with pytest.raises(FencedError):
        files.commit(saving, {"step": 1, "metrics": {}}, {})
    assert whole() == steps(tmp_path / "old") == []


def test_an_attempt_that_was_replaced_removes_nothing_from_the_store(server, tmp_path):
    guard = Replaced(at=False)
    old = mirrored(tmp_path / "old", keep_last=1, guard=guard)
    commit(old, 1)

    def stopped(*arguments):
        for step in (2, 3):
            commit(mirrored(tmp_path / "new"), step)
        guard.at = True

    old.mirror.note = stopped
    with pytest.raises(FencedError):
        commit(old, 1)
    assert whole() == [2, 3]


@pytest.mark.parametrize("part", ["step-000002/actor/weights", "step-000002/manifest.json", "best.json"])
def test_what_a_fault_kept_from_the_store_goes_there_when_the_job_goes_on(server, tmp_path, part):
    best = KeepBest(metric="r")
    commit(mirrored(tmp_path, keep_best=best), 1, r=0.1)
    server.fault = lambda request: "403" if request["PATH_INFO"].endswith(part) else None
    with pytest.raises(StoreError, match="AccessDenied"):
        commit(mirrored(tmp_path, keep_best=best), 2, r=0.9)
    server.fault = None
    files = mirrored(tmp_path, keep_best=best)
    assert files.find()[1]["step"] == 2
    files.complete(2)
    assert whole() == [1, 2] and json.loads(store.read_text(f"{PREFIX}/best.json"))["step"] == 2
    assert store.hash_dir(mirrored(tmp_path / "elsewhere").find()[0]) == store.hash_dir(tmp_path / "step-000002")


def test_a_best_that_a_fault_kept_from_the_store_goes_there_with_the_next_commit(server, tmp_path):
    files = mirrored(tmp_path, keep_last=1, keep_best=KeepBest(metric="r"))
    server.fault = lambda request: "403" if "step-000001" in request["PATH_INFO"] else None
    with pytest.raises(StoreError):
        commit(files, 1, r=0.9)
    server.fault = None
    commit(files, 2, r=0.1)
    assert whole() == [1, 2]


def test_a_checkpoint_that_is_removed_while_it_is_fetched_is_passed_over(server, tmp_path):
    warnings = []
    for step in (1, 2):
        commit(mirrored(tmp_path / "first"), step)
    files = mirrored(tmp_path / "second", warn=warnings.append)
    fetch = files.mirror.fetch

    def removed(name, target):
        if name == "step-000002":
            store.delete(f"{PREFIX}/{name}")
        fetch(name, target)

    files.mirror.fetch = removed
    assert files.find()[1]["step"] == 1 and "step-000002 is not whole" in warnings[0]


class Learned:
    """A learner without models."""

    models: dict = {}

    def begin(self):
        return {}

    def iterate(self, iteration):
        return {"r": float(iteration)}

    def measure(self, seconds):
        return {}

    def shown(self, metrics):
        return metrics

    def state(self):
        return {}

    def restore(self, state):
        pass

    def summary(self):
        return {}

    def export(self, target):
        store.write_bytes(target / "model.safetensors", b"weights")


def run_stage(directory, environment):
    """A stage of two iterations; its outputs, or what it failed with."""
    import os

    from engine.backends.megatron.parallel import start_world
    from engine.job import Job
    from engine.layout import ParallelLayout
    from engine.spec import parse_spec
    from engine.stage import Stage
    from engine.tracking import DatasetInput

    os.environ.update(environment)
    spec = parse_spec({
        "stage": "train", "model": "/m", "prompts": "/p", "algorithm": {"kind": "grpo", "samples_per_prompt": 2},
        "rewards": [{"kind": "regex", "pattern": "x"}], "rollout": {"max_response_tokens": 8}, "actor": {"lr": 1e-4},
        "iterations": 2, "prompts_per_iteration": 1, "checkpoint_dir": PREFIX, "export_dir": str(directory / "export"),
        "keep_best": {"metric": "r"}})
    try:
        stage = Stage(Job(directory), spec, start_world(ParallelLayout()), Learned())
        return stage.run(DatasetInput("train", "", "")).outputs
    except StoreError as error:
        return str(error)


def test_a_stage_never_ends_well_without_its_checkpoints_in_the_store(server, tmp_path):
    environment = {"AWS_ENDPOINT_URL": server.url, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x",
                   "AWS_DEFAULT_REGION": "us-east-1"}
    server.fault = lambda request: "403" if request["PATH_INFO"].endswith("step-000002/manifest.json") else None
    assert "AccessDenied" in shared_ranks(1).run(run_stage, tmp_path, environment)[0]
    server.fault = None
    outputs = shared_ranks(1).run(run_stage, tmp_path, environment)[0]
    assert outputs["checkpoint"] == outputs["best_checkpoint"] == f"{PREFIX}/step-000002"
    assert store.exists(f"{PREFIX}/step-000002/manifest.json")
