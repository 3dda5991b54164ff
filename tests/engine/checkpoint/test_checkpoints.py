"""A checkpoint is whole or does not exist, resumes exactly, and loads under another layout."""

import contextlib
import errno
import json
import os
import pickle
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from engine.errors import MissingError, ModelError, SpecError, StoreError
from engine.fence import FencedError
from tests.engine.backends.megatron_cases import assemble, largest_difference, replica_rows, signal_loss
from tests.engine.multiprocess import run_ranks, shared_ranks
from tests.engine.resharding.hf_models import make_model

LAYOUTS = [(1, {}), (2, {"tp": 2}), (2, {"dp": 2}), (2, {"pp": 2}), (4, {"pp": 2, "dp": 2}), (4, {"tp": 2, "pp": 2})]
SETTINGS = {"lr": 0.01, "schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    # Tied: under pp Megatron keeps two copies in a bucket of their own. 36 wide: no size is a multiple of its padding.
    return str(make_model(tmp_path_factory.mktemp("model"), "qwen3", tie_word_embeddings=True, hidden_size=36))


class Run:
    """An actor and a critic on a rank, with their checkpoints."""

    def __init__(self, model_dir, layout, directory, **options):
        from engine.backends.megatron.parallel import start_world
        from engine.backends.megatron.trainer import TrainedModel, load_network
        from engine.checkpoint import CheckpointFiles, Checkpoints
        from engine.layout import ParallelLayout
        from engine.spec.train import OptimizerSpec

        self.world = start_world(ParallelLayout(**layout), seed=5)
        self.roles = {
            name: TrainedModel(self.world, load_network(model_dir, self.world, head), 40, OptimizerSpec(**SETTINGS), 10)
            for name, head in (("actor", "logprobs"), ("critic", "values"))}
        self.warnings = []
        self.files = CheckpointFiles(Path(directory), warn=self.warnings.append, **options)
        self.checkpoints = Checkpoints(self.files, self.world)
        self.batch = replica_rows(self.world)

    def train(self, steps):
        """Step both; also draw random numbers, as samplers would."""
        from engine.backends.megatron.heads import LogprobHead, value_head

        reports = []
        for _ in range(steps):
            noise = float(torch.rand(())) * 1e-3
            for name, head in (("actor", LogprobHead(0.7, with_entropy=True)), ("critic", value_head)):
                reports.append(self.roles[name].train_step(
                    self.batch, head, lambda outputs, part, n=noise: _noisy(outputs, part, n)))
        return reports

    def snapshot(self):
        """Everything that must survive: parameters, moments, step counts, random states."""
        from engine.checkpoint.rng import rng_state

        state = {}
        for name, role in self.roles.items():
            state |= {f"{name}.{key}": value.detach().clone() for key, value in role.params().items()}
            for part in role.optimizer.parts:
                for index, adam in enumerate(part.optimizer.state.values()):
                    state |= {f"{name}.adam.{index}.{key}": value.clone() for key, value in adam.items()}
            state[f"{name}.steps"] = torch.tensor(role.optimizer.steps)
        rng = rng_state()
        return state | {"rng.torch": rng["torch"], "rng.python": rng["python"]["words"],
                        "rng.numpy": rng["numpy"]["keys"]}


def _noisy(outputs, part, noise):
    loss, sums = signal_loss(outputs, part)
    return loss * (1 + noise), sums


@contextlib.contextmanager
def held_back():
    """Nothing of a model is written before the block ends: what it does in between must not be in the files."""
    from engine.backends.megatron.dist_checkpoint import ModelSnapshot

    write, ended = ModelSnapshot.write, threading.Event()
    ModelSnapshot.write = lambda snapshot: write(snapshot) if ended.wait(60) else None
    try:
        yield
    finally:
        ended.set()
        ModelSnapshot.write = write


def first_half(model_dir, layout, directory):
    import random

    run = Run(model_dir, layout, directory)
    # The noise of a loss has to be the same on all ranks of a replica; other random states may differ.
    torch.manual_seed(run.world.dp_rank)
    random.seed(run.world.rank)
    run.train(1)
    run.checkpoints.save(1, run.roles, {})
    run.train(1)
    with held_back():
        # Into the memory of the one before, which is on disk by now.
        run.checkpoints.save(2, run.roles, {"cursor": [1, 2], "kl": 0.1})
        saved = run.snapshot()
        reports = run.train(2)
    run.checkpoints.wait()
    return saved, reports, run.snapshot()


def second_half(model_dir, layout, directory):
    import random

    import numpy as np

    run = Run(model_dir, layout, directory)
    torch.manual_seed(999)
    random.seed(999)
    np.random.seed(999)
    state = run.checkpoints.load(run.roles)
    loaded = run.snapshot()
    reports = run.train(2)
    return state, loaded, reports, run.snapshot(), run.warnings


def assert_equal(first, second):
    assert set(first) == set(second)
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different, different[:5]


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS, ids=str)
def test_two_steps_and_two_more_after_a_resume_equal_four_to_the_bit(world_size, layout, model_dir, tmp_path):
    ranks = shared_ranks(world_size)
    never_stopped = ranks.run(first_half, model_dir, layout, str(tmp_path))
    resumed = ranks.run(second_half, model_dir, layout, str(tmp_path))
    for (saved, reports, end), (state, loaded, resumed_reports, resumed_end, warnings) in zip(
            never_stopped, resumed, strict=True):
        assert state == {"cursor": [1, 2], "kl": 0.1}
        assert_equal(saved, loaded)
        assert reports == resumed_reports
        assert_equal(end, resumed_end)
        assert not warnings


@pytest.mark.slow
def test_a_resume_in_new_processes_is_exact_too(model_dir, tmp_path):
    never_stopped = run_ranks(first_half, 2, model_dir, {"tp": 2}, str(tmp_path))
    resumed = run_ranks(second_half, 2, model_dir, {"tp": 2}, str(tmp_path))
    for (_, reports, end), (_, _, resumed_reports, resumed_end, _) in zip(never_stopped, resumed, strict=True):
        assert reports == resumed_reports
        assert_equal(end, resumed_end)


def memory_of_saves(model_dir, layout, directory):
    """Addresses that the copies of each of three saves had."""
    run = Run(model_dir, layout, directory)
    kept = []
    for step in (1, 2, 3):
        run.train(1)
        run.checkpoints.save(step, run.roles, {})
        run.checkpoints.wait()
        kept.append({tensor.data_ptr() for role in run.roles.values()
                     for memory in role._staging._memory.values() for tensor in memory})
    return kept


@pytest.mark.parametrize(("world_size", "layout"), [(1, {}), (2, {"dp": 2})], ids=str)
def test_every_save_copies_to_the_memory_of_the_first(world_size, layout, model_dir, tmp_path):
    for first, second, third in shared_ranks(world_size).run(memory_of_saves, model_dir, layout, str(tmp_path)):
        assert first and first == second == third


def weights_by_name(model_dir, layout, directory, save):
    """Train and save, or load; then this rank's part of the actor, its value head, and the next step."""
    from engine.layout import read_model_shape
    from engine.resharding.megatron import MegatronSharding

    run = Run(model_dir, layout, directory)
    if save:
        run.train(2)
        run.checkpoints.save(2, run.roles, {})
        run.checkpoints.wait()
    else:
        run.checkpoints.load(run.roles)
    holdings = MegatronSharding(read_model_shape(model_dir), run.world.layout).holdings(run.world.rank)
    params = {name: value.detach().clone() for name, value in run.roles["actor"].params().items()}
    head = run.roles["critic"].params().get("value_head.weight")
    head = None if head is None else head.detach().clone()
    torch.manual_seed(0)
    return holdings, params, head, run.train(1)


@pytest.mark.parametrize("saved_under", [(2, {"pp": 2}), (4, {"pp": 2, "dp": 2})], ids=str)
def test_a_checkpoint_loads_unchanged_under_other_layouts(saved_under, model_dir, tmp_path):
    world_size, layout = saved_under
    source = shared_ranks(world_size).run(weights_by_name, model_dir, layout, str(tmp_path), True)
    weights = assemble([(holdings, params) for holdings, params, *_ in source])
    for other_size, other in ((1, {}), (2, {"tp": 2}), (2, {"dp": 2}), (4, {"tp": 2, "pp": 2})):
        target = shared_ranks(other_size).run(weights_by_name, model_dir, other, str(tmp_path), False)
        assert largest_difference(weights, assemble([(holdings, params) for holdings, params, *_ in target])) == 0
        heads = [head for _, _, head, _ in (*source, *target) if head is not None]
        assert all(torch.equal(head, heads[0]) for head in heads)
        # The next steps agree only if moments and step count came along.
        for report, expected in zip(target[0][3], source[0][3], strict=True):
            assert report.lr == expected.lr
            assert report.loss == pytest.approx(expected.loss, rel=1e-4)
            assert report.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)


def save_twice(model_dir, directory, damage):
    """Checkpoints of steps 1 and 2; the second is damaged as said; what loads, and the warnings."""
    run = Run(model_dir, {}, directory)
    for step in (1, 2):
        run.train(1)
        run.checkpoints.save(step, run.roles, {"step": step})
    run.checkpoints.wait()
    newest = run.files.directory / "step-000002"
    if damage == "truncated":
        shard = next(newest.glob("actor/*.distcp"))
        os.truncate(shard, shard.stat().st_size // 2)
    elif damage == "flipped":
        shard = next(newest.glob("critic/*.distcp"))
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    elif damage == "missing":
        (newest / "state.json").unlink()
    elif damage == "no manifest":
        (newest / "manifest.json").unlink()
    elif damage == "half a manifest":
        text = (newest / "manifest.json").read_text()
        (newest / "manifest.json").write_text(text[: len(text) // 2])
    elif damage == "torn latest":
        (newest.parent / "latest.json").write_text("{")
    elif damage == "gone":
        shutil.rmtree(newest)
    return run.checkpoints.load(run.roles), run.warnings


@pytest.mark.parametrize(("damage", "step", "warning"), [
    ("truncated", 1, r"step-000002 is not whole: actor/__0_0.distcp has \d+ bytes, the manifest says \d+"),
    ("flipped", 1, "step-000002 is not whole: critic/__0_0.distcp has another content"),
    ("missing", 1, "step-000002 is not whole: state.json is missing"),
    ("no manifest", 1, "step-000002 is not whole: manifest.json cannot be read"),
    ("half a manifest", 1, "step-000002 is not whole: manifest.json cannot be read"),
    ("torn latest", 2, "latest.json cannot be read"),
    ("gone", 1, "step-000002: latest.json names it but it is not there"),
])
def test_a_damaged_checkpoint_falls_back_to_the_last_whole_one_and_says_why(damage, step, warning, model_dir, tmp_path):
    import re

    state, warnings = shared_ranks(1).run(save_twice, model_dir, str(tmp_path), damage)[0]
    assert state == {"step": step}
    assert len(warnings) == 1 and re.search(warning, warnings[0])


def retain(model_dir, directory):
    run = Run(model_dir, {}, directory, keep_last=2)
    (run.files.directory / ".saving-step-000009").mkdir(parents=True)
    for step in (1, 2, 10):
        run.checkpoints.save(step, run.roles, {"step": step})
    run.checkpoints.save(10, run.roles, {"step": "again"})
    return run.checkpoints.load(run.roles), sorted(path.name for path in run.files.directory.iterdir())


def test_old_checkpoints_and_leftovers_of_killed_saves_go_and_a_step_can_be_saved_again(model_dir, tmp_path):
    state, names = shared_ranks(1).run(retain, model_dir, str(tmp_path))[0]
    assert state == {"step": "again"}
    assert names == ["latest.json", "step-000002", "step-000010"]
    assert json.loads((tmp_path / "latest.json").read_text()) == {"checkpoint": "step-000010", "step": 10}


def nothing_there(model_dir, directory):
    run = Run(model_dir, {}, directory)
    with pytest.raises(MissingError, match="elsewhere: no whole checkpoint there"):
        run.checkpoints.load(run.roles, f"{directory}/elsewhere")
    assert run.checkpoints.load(run.roles) is None
    run.checkpoints.save(1, {"actor": run.roles["actor"]}, {})
    with pytest.raises(StoreError, match=r"holds \['actor'\], not 'critic'"):
        run.checkpoints.load(run.roles)
    named = f"{directory}/step-000001"
    assert run.checkpoints.load({"actor": run.roles["actor"]}, named) == {}


def test_no_checkpoint_is_a_fresh_start_unless_one_was_named(model_dir, tmp_path):
    shared_ranks(1).run(nothing_there, model_dir, str(tmp_path))


def fail_on_rank_one(model_dir, directory, where):
    """Disk full on rank 1 while step 2 is saved: both ranks raise, step 1 still loads."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    import engine.checkpoint.checkpoints as checkpoints

    run = Run(model_dir, {"dp": 2}, directory)
    run.checkpoints.save(1, run.roles, {"step": 1})
    run.train(1)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a file")

    class FullDisk:
        def __getattr__(self, name):
            return full if name == "fsync" else getattr(os, name)

    target, name, stand_in = {
        "rng": (checkpoints, "open", full), "shards": (filesystem_async, "os", FullDisk())}[where]
    if run.world.rank == 1:
        setattr(target, name, stand_in)
    try:
        run.checkpoints.save(2, run.roles, {"step": 2})
        with pytest.raises(StoreError) as failure:
            while True:  # the training goes on; the next iteration is told
                run.train(1)
                run.checkpoints.poll()
    finally:
        target.open, filesystem_async.os = open, os
    return str(failure.value), run.checkpoints.load(run.roles), run.warnings


@pytest.mark.parametrize("where", ["rng", "shards"])
def test_a_full_disk_on_one_rank_fails_all_ranks_and_keeps_the_checkpoint_before(where, model_dir, tmp_path):
    results = shared_ranks(2).run(fail_on_rank_one, model_dir, str(tmp_path), where)
    assert any("No space left on device" in message for message, _, _ in results)
    assert all(state == {"step": 1} and not warnings for _, state, warnings in results)


def test_random_states_load_as_plain_tensors_and_continue_where_they_were(tmp_path):
    assert shared_ranks(1).run(random_round_trip, str(tmp_path / "rng.pt"))[0]


def random_round_trip(path):
    import random

    import numpy as np

    from engine.backends.megatron.parallel import start_world
    from engine.checkpoint.rng import rng_state, set_rng_state
    from engine.layout import ParallelLayout

    def draw():
        return random.random(), random.gauss(0, 1), np.random.standard_normal(3).tolist(), torch.rand(3).tolist()

    start_world(ParallelLayout())
    random.gauss(0, 1)
    np.random.standard_normal(1)
    torch.save(rng_state(), path)
    expected = draw()
    draw()
    set_rng_state(torch.load(path, weights_only=True))
    return draw() == expected


def test_a_role_directory_holds_no_more_than_one_file_a_rank_and_role(model_dir, tmp_path):
    shared_ranks(2).run(first_half, model_dir, {"tp": 2}, str(tmp_path))
    shards = sorted(path.name for path in (tmp_path / "step-000002" / "actor").glob("*.distcp"))
    assert shards == ["__0_0.distcp", "__1_0.distcp"]
    assert not list(tmp_path.glob(".*"))


class SlowRole:
    """A role whose write waits until it is told to go on."""

    def __init__(self):
        self.go = threading.Event()

    def snapshot(self, directory):
        self.directory = directory
        return self

    def write(self):
        assert self.go.wait(60)
        (self.directory / "content").write_text("x")

    def seal(self, written):
        assert written == [None]


def train_beside_a_slow_save(directory):
    from engine.backends.megatron.parallel import start_world
    from engine.checkpoint import CheckpointFiles, Checkpoints
    from engine.layout import ParallelLayout

    role, state, told = SlowRole(), {"iteration": 1}, []
    checkpoints = Checkpoints(
        CheckpointFiles(Path(directory)), start_world(ParallelLayout()),
        saved=lambda step, blocked_s, whole_s: told.append((step, path.exists(), 0 < blocked_s < whole_s)))
    path = checkpoints.save(1, {"actor": role}, state)
    state["iteration"] = 2
    checkpoints.poll()
    returned_early = not path.exists() and not told
    role.go.set()
    checkpoints.close()
    return returned_early, told, json.loads((path / "state.json").read_text()), checkpoints.load({})


def test_the_training_goes_on_while_a_save_is_written_and_no_exit_comes_before_its_end(tmp_path):
    early, told, written, loaded = shared_ranks(1).run(train_beside_a_slow_save, str(tmp_path))[0]
    assert early and told == [(1, True, True)]
    assert written == loaded == {"iteration": 1}


def wait_for_slow_files(directory):
    """Everything that rank 0 does with files alone takes longer than the training's collectives may."""
    from datetime import timedelta

    import torch.distributed as dist

    import engine.model_files
    from engine.backends.megatron.parallel import start_world
    from engine.checkpoint import CheckpointFiles, Checkpoints
    from engine.layout import ParallelLayout

    class SlowFiles(CheckpointFiles):
        def commit(self, *arguments):
            time.sleep(4)
            return super().commit(*arguments)

        def find(self, source=None):
            time.sleep(4)
            return super().find(source)

    def download(uri, target):
        time.sleep(4)
        target.mkdir()

    world = start_world(ParallelLayout(dp=2))
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)
    engine.model_files.store.download_dir = download
    engine.model_files.local_model("s3://bucket/model", Path(directory) / "model", world.rank)
    checkpoints = Checkpoints(SlowFiles(Path(directory) / "checkpoints"), world)
    checkpoints.save(1, {}, {"step": 1})
    return checkpoints.load({})


def test_ranks_wait_for_the_files_of_the_first_longer_than_for_its_collectives(tmp_path):
    assert run_ranks(wait_for_slow_files, 2, str(tmp_path)) == [{"step": 1}] * 2


def fail_to_find(directory, kind):
    from engine.backends.megatron.parallel import start_world
    from engine.checkpoint import CheckpointFiles, Checkpoints
    from engine.layout import ParallelLayout

    def find(source):
        raise kind("list s3://bucket/x: the store answers NoSuchBucket (HTTP 404)")

    checkpoints = Checkpoints(CheckpointFiles(Path(directory)), start_world(ParallelLayout(dp=2)))
    checkpoints.files.find = find
    with pytest.raises(kind) as failure:
        checkpoints.load({})
    return failure.type, str(failure.value)


@pytest.mark.parametrize("kind", [MissingError, SpecError, StoreError, FencedError])
def test_every_rank_fails_with_the_error_of_the_first(kind, tmp_path):
    expected = (kind, "list s3://bucket/x: the store answers NoSuchBucket (HTTP 404)")
    assert shared_ranks(2).run(fail_to_find, str(tmp_path), kind) == [expected] * 2


def skip_and_resume(model_dir, directory):
    run = Run(model_dir, {}, directory)
    run.roles["actor"].optimizer.skipped_in_a_row = 2
    run.checkpoints.save(1, run.roles, {})
    run.roles["actor"].optimizer.skipped_in_a_row = 0
    run.checkpoints.load(run.roles)
    return run.roles["actor"].optimizer.skipped_in_a_row


def test_the_count_of_skipped_steps_survives(model_dir, tmp_path):
    assert shared_ranks(1).run(skip_and_resume, model_dir, str(tmp_path))[0] == 2


class Bomb:
    """Runs something when it is unpickled without care."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def load_a_foreign_checkpoint(model_dir, directory, name):
    """A checkpoint whose manifest is right but one of whose files runs code."""
    from engine.checkpoint.manifest import write_manifest

    run = Run(model_dir, {}, directory)
    run.checkpoints.save(1, run.roles, {})
    run.checkpoints.wait()
    checkpoint = run.files.directory / "step-000001"
    for path in checkpoint.rglob(".metadata" if name in FOREIGN_INDEX else name):
        if name in FOREIGN_INDEX:
            change_index(path, name, f"{directory}/exploded")
        elif name == ".metadata":
            path.write_bytes(pickle.dumps(Bomb(f"{directory}/exploded")))
        else:
            torch.save(Bomb(f"{directory}/exploded"), path)
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint, {"step": 1, "layout": str(run.world.layout), "roles": sorted(run.roles), "metrics": {}})
    with pytest.raises((ModelError, pickle.UnpicklingError, CheckpointException)) as refused:
        run.checkpoints.load(run.roles)
    return str(refused.value)


FOREIGN_INDEX = {
    "a tensor as bytes": "decoder.final_layernorm.weight is no tensor",
    "an extra state": "Weights only load failed",
    "another place": "names the place",
    "a transform": "names the place",
}


def change_index(path, change, exploded):
    """Let an index of only allowed classes lead to a file that runs code, or to one outside the checkpoint."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

    index = pickle.loads(path.read_bytes())
    key = "decoder.final_layernorm.weight"
    if change == "an extra state":
        key = next(key for key in index.state_dict_metadata if "._extra_state/" in key)
    place = next(place for name, place in index.storage_data.items() if name.fqn == key)
    if change == "another place":
        place.relative_path = f"../actor/{place.relative_path}"
    elif change == "a transform":
        place.transform_descriptors = ["zstd"]
    else:
        torch.save(Bomb(exploded), path.parent / "bomb.distcp")
        place.relative_path, place.offset = "bomb.distcp", 0
        place.length = (path.parent / "bomb.distcp").stat().st_size
        entry = BytesStorageMetadata()
        if change == "a tensor as bytes":
            # Megatron compares shapes, and nothing else of the entry.
            entry.size = index.state_dict_metadata[key].size
        index.state_dict_metadata[key] = entry
        index.storage_data[MetadataIndex(key)] = place
    path.write_bytes(pickle.dumps(index))


@pytest.mark.parametrize("name", [".metadata", "common.pt", "rank-00000.pt", *FOREIGN_INDEX])
def test_a_foreign_checkpoint_runs_no_code(name, model_dir, tmp_path):
    said = shared_ranks(1).run(load_a_foreign_checkpoint, model_dir, str(tmp_path), name)[0]
    reasons = (FOREIGN_INDEX[name],) if name in FOREIGN_INDEX else ("pathlib.Path.touch", "Weights only load failed")
    assert any(reason in said for reason in reasons)
    assert not (tmp_path / "exploded").exists()


def test_what_the_training_goes_on_with_is_copied_and_what_was_gathered_is_not_copied_again():
    from engine.backends.megatron.dist_checkpoint import copied
    from engine.backends.megatron.staging import Staging

    trained, gathered = torch.ones(4), torch.ones(4)
    buckets = [("file", "key", (["text"], [("a", trained[1:3]), ("b", gathered[:2])]))]
    live = {trained.untyped_storage().data_ptr()}
    ((_, _, (texts, [(_, first), (_, second)])),) = copied(buckets, live, Staging(), shared=False)
    ((_, _, (_, [_, (_, part)])),) = copied(buckets, live, Staging(), shared=True)
    trained += 1
    assert first.tolist() == [1, 1] and texts == ["text"]
    assert second.data_ptr() == gathered.data_ptr()
    assert part.tolist() == [1, 1] and part.untyped_storage().nbytes() == 8
