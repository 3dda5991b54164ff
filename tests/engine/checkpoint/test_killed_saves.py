"""A save that is killed, or that fails, at every single file operation leaves the checkpoint before it or itself."""

import errno
import os
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.errors import StoreError
from engine.spec.train import KeepBest
from tests.engine.checkpoint.test_checkpoints import Run, assert_equal
from tests.engine.multiprocess import shared_ranks
from tests.engine.resharding.hf_models import make_model

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink")


class Killed(BaseException):
    """The process is gone: nothing after this reaches the disk."""


class Disk:
    """Counts what a process does to its files. From the `at`-th operation on nothing happens, or only that one fails.

    Python announces operations to audit hooks, which cannot be removed: one for the process, `active` while armed.
    """

    def __init__(self):
        self.active, self.count, self.at, self.kill = False, 0, None, False
        self.error = errno.ENOSPC
        self.synced: set[int] = set()
        self._fsync = os.fsync
        sys.addaudithook(self._hook)

    @contextmanager
    def armed(self, directory, at, kill):
        """Fault operation number `at`. When killed, files that were not synced lose the second half of what they hold,
        as they may in a power cut."""
        before = {path.stat().st_ino for path in directory.rglob("*")}
        self.active, self.count, self.at, self.kill, self.synced = True, 0, at, kill, before
        os.fsync = self._count_fsync
        try:
            yield
        finally:
            self.active, os.fsync = False, self._fsync
        if kill and self.count >= at:
            for path in directory.rglob("*"):
                if path.is_file() and path.stat().st_ino not in self.synced:
                    os.truncate(path, path.stat().st_size // 2)

    def _count_fsync(self, handle):
        self._operation()
        self.synced.add(os.fstat(handle if isinstance(handle, int) else handle.fileno()).st_ino)

    def _hook(self, event, arguments):
        if self.active and (event in CHANGES or (event == "open" and (arguments[2] or 0) & WRITES)):
            self._operation()

    def _operation(self):
        self.count += 1
        if self.kill and self.count >= self.at:
            raise Killed
        if not self.kill and self.count == self.at:
            raise OSError(self.error, os.strerror(self.error), "a file")


_disk: list[Disk] = []


SCORES = {"old": 0.1, "new": 0.9, "next": 0.5}
"""The metric of the best checkpoint, by what a checkpoint holds."""


def fault_every_operation(model_dir, directory, step, error):
    """Checkpoint 1 is there; a save of `step` is faulted at operation 1, 2, 3, ... until one gets through."""

    if not _disk:
        _disk.append(Disk())
    kill, _disk[0].error = error is None, error
    disk, start, work = _disk[0], Path(directory) / "start", Path(directory) / "work"
    run = Run(model_dir, {}, str(start), keep_best=KeepBest(metric="r"))
    reference = reopened(run, Path(directory) / "reference")
    roles, snapshots = {"actor": run.roles["actor"]}, {}
    for content, checkpoints in (("old", run.checkpoints), ("new", reference)):
        run.train(1)
        checkpoints.save(1, roles, {"content": content}, {"r": SCORES[content]})
        checkpoints.wait()
        snapshots[content] = actor_of(run.snapshot())
    found = []
    for at in range(1, 1000):
        shutil.copytree(start, work)
        with disk.armed(work, at, kill):
            failure = try_to_save(reopened(run, work), roles, step)
        found.append(check_what_loads(run, work, roles, (step, snapshots)))
        # What could be done without (a folder that is there already) may fail; then the save went well.
        assert failure is not None or found[-1] == "new"
        shutil.rmtree(work)
        if disk.count < at:
            return found
        if found[-1] == "old":
            reference.load(roles)
    raise AssertionError("the save never got through")


def try_to_save(checkpoints, roles, step):
    try:
        checkpoints.save(step, roles, {"content": "new"}, {"r": SCORES["new"]})
        checkpoints.wait()
    except (StoreError, Killed) as error:
        return error
    return None


def check_what_loads(run, work, roles, expected):
    """Load in what stands for a new process; then the next save works, the best stays and nothing else is left over."""
    checkpoints, (step, snapshots) = reopened(run, work), expected
    state = checkpoints.load(roles)
    assert state is not None, sorted(path.name for path in work.iterdir())
    assert_equal(actor_of(run.snapshot()), snapshots[state["content"]])
    checkpoints.complete()
    checkpoints.save(3, roles, {"content": "next"}, {"r": SCORES["next"]})
    checkpoints.wait()
    assert checkpoints.files.find()[1]["step"] == 3
    best = [f"step-{step:06d}"] if state["content"] == "new" else []
    assert sorted(path.name for path in work.iterdir()) == ["best.json", "latest.json", *best, "step-000003"]
    assert checkpoints.files.best == [*best, "step-000003"][0]
    return state["content"]


def actor_of(snapshot):
    return {name: value for name, value in snapshot.items() if not name.startswith("critic")}


def reopened(run, work):
    from engine.checkpoint import CheckpointFiles, Checkpoints

    checkpoints = Checkpoints(CheckpointFiles(
        work, keep_last=1, keep_best=KeepBest(metric="r"), warn=run.warnings.append), run.world)
    checkpoints._group = run.checkpoints._group
    return checkpoints


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=1))


@pytest.mark.slow
@pytest.mark.parametrize(("error", "step"), [(None, 2), (None, 1), (errno.ENOSPC, 2), (errno.EROFS, 1)], ids=[
    "killed, a new step", "killed, the same step again", "disk full, a new step", "read-only, the same step again"])
def test_a_save_faulted_at_any_file_operation_leaves_the_old_or_the_new_checkpoint(model_dir, tmp_path, step, error):
    found = shared_ranks(1).run(fault_every_operation, model_dir, str(tmp_path), step, error, timeout_s=500)[0]
    assert len(found) > 30  # operations of one save
    assert set(found) == {"old", "new"}
    if error is None:
        assert found == sorted(found, reverse=True)  # once the new one is visible it stays visible
