"""Checkpoints in an object store: there whole or not at all, found by a machine that never saw them."""

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


def test_an_attempt_that_was_replaced_makes_nothing_visible(server, tmp_path):
    @contextmanager
    def replaced():
        raise FencedError("attempt 2 has taken over")
        yield

    with pytest.raises(FencedError):
        commit(mirrored(tmp_path / "old", guard=replaced), 1)
    assert whole() == steps(tmp_path / "old") == []
