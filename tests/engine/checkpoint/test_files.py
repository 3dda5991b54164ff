"""Which checkpoints stay: newest, best, used by another job; what a run that went back has left behind goes."""

import contextlib
import errno
import json
import math
import os

import pytest

from engine.checkpoint.files import CheckpointFiles, in_use
from engine.errors import SpecError
from engine.fence import FencedError
from engine.spec.train import KeepBest
from engine.store import sha256_file, write_atomic


def commit(files, step, **metrics):
    files.check_metrics(metrics)
    saving = files.prepare(step, ["actor"])
    (saving / "actor" / "weights").write_text(f"{step} {metrics}")
    return files.commit(saving, {"step": step, "metrics": metrics}, {"step": step})


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def steps(directory):
    return [int(name.removeprefix("step-")) for name in names(directory) if name.startswith("step-")]


def test_checkpoints_of_earlier_attempts_are_counted(tmp_path):
    for step in (1, 2):
        commit(CheckpointFiles(tmp_path, keep_last=2), step)
    commit(CheckpointFiles(tmp_path, keep_last=2), 3)
    assert names(tmp_path) == ["latest.json", "step-000002", "step-000003"]


def test_the_one_just_saved_stays_also_when_damaged_newer_ones_are_there(tmp_path):
    """A run that fell back past a damaged checkpoint: counting by step alone would remove what it saves."""
    files = CheckpointFiles(tmp_path, keep_last=1)
    commit(files, 9)
    (tmp_path / "step-000009" / "state.json").unlink()
    commit(files, 4)
    assert names(tmp_path) == ["latest.json", "step-000004"]
    assert files.find()[0].name == "step-000004"


@pytest.mark.parametrize(("better", "kept"), [("higher", [3, 6]), ("lower", [1, 6])])
def test_the_best_stays_beside_the_newest(tmp_path, better, kept):
    files = CheckpointFiles(tmp_path, keep_last=1, keep_best=KeepBest(metric="reward/mean", better=better))
    for step, reward in enumerate([0.1, 0.5, 0.9, math.nan, 0.3, 0.4], start=1):
        commit(files, step, **{"reward/mean": reward})
    assert steps(tmp_path) == kept
    assert files.best == f"step-{kept[0]:06d}"
    assert json.loads((tmp_path / "best.json").read_text())["metric"] == "reward/mean"


def test_a_best_that_is_saved_again_is_compared_anew(tmp_path):
    files = CheckpointFiles(tmp_path, keep_last=2, keep_best=KeepBest(metric="r"))
    commit(files, 1, r=0.9)
    commit(files, 1, r=0.1)
    commit(files, 2, r=0.2)
    assert files.best == "step-000002"


def test_a_metric_that_is_not_measured_is_an_error_that_names_those_that_are(tmp_path):
    files = CheckpointFiles(tmp_path, keep_best=KeepBest(metric="rewards/mean"))
    with pytest.raises(SpecError, match=r"keep_best.metric: 'rewards/mean' is not measured; there are kl, reward/mean"):
        commit(files, 1, **{"reward/mean": 1.0, "kl": 0.0})
    assert not list(tmp_path.iterdir())


def test_what_another_job_loads_is_not_removed_and_goes_with_the_next_commit(tmp_path):
    files = CheckpointFiles(tmp_path, keep_last=1)
    first = commit(files, 1)
    with in_use(first):
        commit(files, 2)
        assert steps(tmp_path) == [1, 2]
    commit(files, 3)
    assert steps(tmp_path) == [3]


def test_two_attempts_that_save_the_same_step_do_not_share_a_directory(tmp_path):
    files = CheckpointFiles(tmp_path)
    old = files.prepare(1, ["actor"])
    new = CheckpointFiles(tmp_path).prepare(1, ["actor"])
    assert old != new and not old.exists()


def test_an_attempt_that_was_replaced_touches_nothing_of_the_new_ones(tmp_path):
    commit(CheckpointFiles(tmp_path), 1)
    CheckpointFiles(tmp_path).prepare(2, ["actor"])
    (tmp_path / "step-000001").rename(tmp_path / ".replaced-step-000001")
    before = names(tmp_path)

    @contextlib.contextmanager
    def replaced():
        raise FencedError("attempt 2 has taken over")
        yield

    old = CheckpointFiles(tmp_path, guard=replaced)
    for action in (lambda: old.prepare(2, ["actor"]), old.find):
        with pytest.raises(FencedError):
            action()
    assert names(tmp_path) == before


def test_a_best_whose_note_a_kill_prevented_is_noted_when_the_job_goes_on(tmp_path, monkeypatch):
    files = CheckpointFiles(tmp_path, keep_last=1, keep_best=KeepBest(metric="r"))
    commit(files, 1, r=0.1)

    def killed(path, content):
        if path.name == "best.json":
            raise KeyboardInterrupt
        write_atomic(path, content)

    monkeypatch.setattr("engine.checkpoint.files.write_atomic", killed)
    with pytest.raises(KeyboardInterrupt):
        commit(files, 2, r=0.9)
    monkeypatch.undo()
    assert files.find()[1]["step"] == 2
    files.complete(2)
    commit(files, 3, r=0.5)
    assert files.best == "step-000002" and steps(tmp_path) == [2, 3]


@pytest.mark.parametrize("content", ["null", "[]", "7", '{"format": 2}', '{"format": 2, "files": null}'])
def test_a_manifest_or_note_of_another_shape_counts_as_not_whole(tmp_path, content):
    warnings = []
    files = CheckpointFiles(tmp_path, keep_best=KeepBest(metric="r"), warn=warnings.append)
    for step in (1, 2):
        commit(files, step, r=1.0)
    for name in ("step-000002/manifest.json", "latest.json", "best.json"):
        (tmp_path / name).write_text(content)
    assert files.find()[1]["step"] == 1 and len(warnings) == 2
    assert files.best is None


def test_a_file_that_the_disk_does_not_give_back_makes_the_checkpoint_before_be_taken(tmp_path, monkeypatch):
    warnings = []
    files = CheckpointFiles(tmp_path, warn=warnings.append)
    for step in (1, 2):
        commit(files, step)

    def broken(path):
        if "step-000002" in str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return sha256_file(path)

    monkeypatch.setattr("engine.checkpoint.manifest.sha256_file", broken)
    assert files.find()[1]["step"] == 1
    assert "cannot be read: Input/output error" in warnings[0]
