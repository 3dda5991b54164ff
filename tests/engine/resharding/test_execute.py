"""Transfers over gloo: every value where it belongs, counted bytes equal to the plan's, refusals after failures."""

import multiprocessing as mp
import os
import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from engine.errors import LayoutError, ReshardError
from engine.layout import GenerationLayout, ModelShape, ParallelLayout
from engine.resharding.cost import lower_bound, rank_cost
from engine.resharding.execute import SyncOptions, WeightSync
from engine.resharding.fsdp import FsdpSharding
from engine.resharding.megatron import MegatronSharding
from engine.resharding.placement import Placement
from engine.resharding.plan import plan_rank
from engine.resharding.views import LowRank, shared_views
from engine.resharding.vllm import VllmSharding
from tests.engine.multiprocess import Ranks
from tests.engine.resharding import oracles
from tests.engine.resharding.cases import Case, seeded_cases

LLAMA = ModelShape("llama", 4, 64, 96, 8, 4, 8, 100, True)
CASES = 96
SOON = SyncOptions(timeout_s=60)


@pytest.fixture(scope="module")
def ranks():
    with Ranks(8) as processes:
        yield processes


def expected(sharding, shape, full, rank):
    """What the oracle says `rank` holds."""
    index = list(sharding.ranks).index(rank)
    if isinstance(sharding, MegatronSharding):
        return oracles.megatron_params(full, shape, sharding.layout, index,
                                       (sharding.vocab_multiple, sharding.virtual_stages))
    if isinstance(sharding, VllmSharding):
        return oracles.vllm_params(full, shape, sharding.tp, index, expert_parallel=sharding.expert_parallel)
    return oracles.fsdp_params(full, sharding.world_size, index) if isinstance(sharding, FsdpSharding) else dict(full)


def world():
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.get_rank()


def transfer(case: Case, src_params, dst_params, options=SOON):
    plan = plan_rank(case.src, case.dst, dist.get_rank(), Placement(case.ranks_per_node))
    report = WeightSync(plan, src_params, dst_params, None, options).run(1)
    assert (report.bytes_received, report.bytes_sent) == (rank_cost(plan, 4).received, rank_cost(plan, 4).sent)
    assert report.bytes_received == lower_bound(plan, 4)
    assert report.peak_extra_bytes <= options.bucket_bytes
    return report


def run_case(case: Case, bucket_bytes: int) -> int:
    """A -> B with the oracle's values, then B -> A into fresh memory; returns bytes received."""
    rank, tensors = dist.get_rank(), case.dst.tensors
    full = oracles.full_tensors(case.shape, {name: tensor.shape for name, tensor in tensors.items()})
    sides = []
    for sharding in (case.src, case.dst):
        sides.append(expected(sharding, case.shape, full, rank) if rank in sharding.ranks else {})
    src_params, want = sides
    options = SyncOptions(bucket_bytes=bucket_bytes, timeout_s=60)
    got = {name: torch.full_like(value, oracles.UNTOUCHED) for name, value in want.items()}
    received = transfer(case, src_params, got, options).bytes_received
    assert_equal(got, want)
    back = {name: torch.full_like(value, oracles.UNTOUCHED) for name, value in src_params.items()}
    transfer(Case(case.shape, case.dst, case.src, case.world_size, case.ranks_per_node), got, back, options)
    assert_equal(back, src_params)
    return received


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def run_cases(count: int, seed: int) -> int:
    world()
    received = 0
    for index, case in enumerate(seeded_cases(count, seed)):
        received += run_case(case, bucket_bytes=[64 << 20, 4096, 512][index % 3])
    return received


def test_random_transfers_put_every_value_in_its_place_and_back(ranks):
    assert sum(ranks.run(run_cases, CASES, 0, timeout_s=600)) > 0


def megatron_to_vllm(train: tuple, serve: int, world_size: int = 8) -> Case:
    tp, pp, dp = train
    return Case(LLAMA, MegatronSharding(LLAMA, ParallelLayout(tp=tp, pp=pp, dp=dp)),
                VllmSharding(LLAMA, GenerationLayout(serve), world_size), world_size, 8)


def llama_params(case: Case, dtype=torch.float32, seed=0):
    """Source parameters, expected destination, empty destination of this rank."""
    full = oracles.full_tensors(LLAMA, {name: tensor.shape for name, tensor in case.dst.tensors.items()}, seed)
    src = {name: value.clone() for name, value in expected(case.src, LLAMA, full, dist.get_rank()).items()}
    want = {name: value.to(dtype) for name, value in expected(case.dst, LLAMA, full, dist.get_rank()).items()}
    return src, want, {name: torch.full_like(value, oracles.UNTOUCHED) for name, value in want.items()}


def cast_on_the_way():
    world()
    case = megatron_to_vllm((4, 2, 1), 2)
    src, want, got = llama_params(case, torch.bfloat16)
    plan = plan_rank(case.src, case.dst, dist.get_rank())
    report = WeightSync(plan, src, got, None, SOON).run(1)
    assert_equal(got, want)
    return report.bytes_received == lower_bound(plan, 2)


def test_a_cast_happens_before_the_wire_and_halves_its_bytes(ranks):
    assert all(ranks.run(cast_on_the_way))


def versions():
    world()
    case = megatron_to_vllm((2, 2, 2), 4)
    src, want, got = llama_params(case)
    sync = WeightSync(plan_rank(case.src, case.dst, dist.get_rank()), src, got, None, SOON)
    with pytest.raises(ReshardError, match="no complete policy version"):
        sync.require(3)
    first = sync.run(3)
    sync.require(3)
    with pytest.raises(ReshardError, match="holds policy version 3, asked for 4"):
        sync.require(4)
    for value in src.values():
        value.add_(1.0)
    again = sync.run(3)
    assert_equal(got, want)
    assert (again.bytes_received, again.bytes_sent, again.bytes_copied, again.messages) == (0, 0, 0, 0)
    newer = sync.run(4)
    for name in want:
        real = want[name] != oracles.UNTOUCHED
        assert torch.equal(got[name][real], want[name][real] + 1.0)
    sync.invalidate()
    with pytest.raises(ReshardError, match="given up"):
        sync.require(4)
    assert sync.run(4).bytes_received == newer.bytes_received == first.bytes_received
    return first.bytes_received


def test_nothing_moves_for_a_version_that_is_served_and_everything_for_a_new_one(ranks):
    assert sum(ranks.run(versions)) > 0


def one_wrong_shape(fault: str):
    rank = world()
    case = megatron_to_vllm((2, 2, 2), 2)
    src, _, got = llama_params(case)
    if rank == 5:
        if fault == "shape":
            src["decoder.final_layernorm.weight"] = torch.zeros(63)
        elif fault == "missing":
            del got["model.norm.weight"]
        elif fault == "unknown":
            got["model.norm.bias"] = torch.zeros(64)
        elif fault == "dtype":
            src["decoder.final_layernorm.weight"] = torch.zeros(64, dtype=torch.float64)
    try:
        WeightSync(plan_rank(case.src, case.dst, rank), src, got, None, SOON)
    except LayoutError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(("fault", "message"), [
    ("shape", r"decoder.final_layernorm.weight: rank 5 of Megatron .* should hold shape \(64,\), found \(63,\)"),
    ("missing", r"model.norm.weight: rank 5 of vLLM tp=2 should hold it with shape \(64,\)"),
    ("unknown", r"model.norm.bias: rank 5 of vLLM tp=2 has this parameter .* that the catalog does not know"),
    ("dtype", r"final_norm.weight: src has dtype float64 on rank 5 and float32 on others"),
])
def test_a_wrong_parameter_on_one_rank_is_refused_by_all_ranks(ranks, fault, message):
    for text in ranks.run(one_wrong_shape, fault):
        assert re.search(message, text) or (fault == "dtype" and "dtype" in text), text


def low_rank():
    rank = world()
    case = megatron_to_vllm((2, 2, 2), 4)
    src, _, got = llama_params(case)
    coords = case.src.layout.coords(rank)
    generator = torch.Generator().manual_seed(100 * coords.tp + coords.pp)
    deltas = {name: LowRank(torch.randn(3, value.shape[1], generator=generator),
                            torch.randn(value.shape[0], 3, generator=generator), 0.5)
              for name, value in src.items() if "linear" in name}
    merged = {name: torch.addmm(value, deltas[name].b, deltas[name].a, alpha=0.5) if name in deltas else value
              for name, value in src.items()}
    before = {name: value.clone() for name, value in src.items()}
    want = {name: torch.full_like(value, oracles.UNTOUCHED) for name, value in got.items()}
    transfer(case, merged, want)
    transfer(case, src, got, SyncOptions(deltas=deltas, timeout_s=60, bucket_bytes=1 << 16))
    assert_equal(src, before)
    return max((got[name] - want[name]).abs().max().item() for name in want)


def test_low_rank_updates_are_merged_on_the_way_and_the_base_stays(ranks):
    assert max(ranks.run(low_rank)) < 1e-5


def memory_shared_with_the_source():
    rank = world()
    case = megatron_to_vllm((2, 2, 2), 2)
    src, want, got = llama_params(case)
    plan = plan_rank(case.src, case.dst, rank)
    shared = shared_views(case.src.holdings(rank), case.dst.holdings(rank), src)
    layers = {int(name.split(".")[2]) for name in shared if "layers" in name}
    assert layers == ({0, 1} if rank < 4 else {2, 3})
    assert not any("qkv" in name for name in shared) and any("gate_up" in name for name in shared)
    report = WeightSync(plan, src, got | shared, None, SOON).run(1)
    assert_equal(got | shared, want)
    assert report.bytes_shared == sum(4 * view.numel() for view in shared.values())
    name, view = next(iter(shared.items()))
    before = view.clone()
    for value in src.values():
        value.add_(1.0)
    return torch.equal(view, before + 1.0)


def test_a_destination_that_lies_right_in_the_source_is_a_view_and_costs_nothing(ranks):
    assert all(ranks.run(memory_shared_with_the_source))


def failure_then_success():
    rank = world()
    case = megatron_to_vllm((4, 2, 1), 2)
    src, want, got = llama_params(case)
    sync = WeightSync(plan_rank(case.src, case.dst, rank), src, got, None, SOON)
    sync.run(1)
    whole = sync._land

    def lands_once_then_fails(flight):
        whole(flight)
        raise ReshardError("injected")

    sync._land = lands_once_then_fails
    with pytest.raises(ReshardError, match="injected"):
        sync.run(2)
    for version in (1, 2):
        with pytest.raises(ReshardError, match="the transfer of version 2 did not complete"):
            sync.require(version)
    sync._land = whole
    sync.run(2)
    sync.require(2)
    assert_equal(got, want)
    return True


def test_after_a_failed_transfer_nothing_is_served_until_a_whole_one_succeeded(ranks):
    assert all(ranks.run(failure_then_success))


def rank_two_goes(how: str):
    rank = world()
    case = megatron_to_vllm((2, 2, 1), 1, world_size=4)
    src, _, got = llama_params(case)
    sync = WeightSync(plan_rank(case.src, case.dst, rank), src, got, None, SyncOptions(timeout_s=3))
    if rank == 2:
        if how == "dies":
            os._exit(17)
        time.sleep(8)
        return "late"
    start = time.monotonic()
    try:
        sync.run(1)
    except ReshardError as error:
        assert time.monotonic() - start < 8
        with pytest.raises(ReshardError, match="no complete policy version"):
            sync.require(1)
        return str(error)
    return "served"


def test_a_rank_that_never_joins_is_an_error_before_the_deadline_that_names_tensor_and_rank():
    with Ranks(4) as few:
        messages = few.run(rank_two_goes, "sleeps")
    assert messages[2] == "late"
    for rank in (0, 1, 3):
        assert "did not complete within 3 s" in messages[rank] and "gone or stuck" in messages[rank]
    assert any("model." in text and "rank 2 is gone or stuck" in text for text in messages)


def survive(rank: int, directory: str):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=4)
    message = rank_two_goes("dies")
    Path(directory, f"rank-{rank}").write_text(message)


def test_a_rank_that_dies_during_a_transfer_is_named_by_the_others_without_a_hang(tmp_path):
    context = mp.get_context("spawn")
    processes = [context.Process(target=survive, args=(rank, str(tmp_path))) for rank in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    assert processes[2].exitcode == 17
    messages = [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1, 3)]
    assert all("gone or stuck" in text for text in messages)
    assert any("model." in text and "rank 2 is gone or stuck" in text for text in messages)
