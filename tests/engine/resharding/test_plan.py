"""Plans: every missing element once, from a rank that has it, and no byte more than the lower bound."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from engine.errors import LayoutError, ReshardError
from engine.layout import GenerationLayout, ModelShape, ParallelLayout
from engine.resharding.boxes import full_box, intersect, volume
from engine.resharding.cost import lower_bound, rank_cost
from engine.resharding.megatron import MegatronSharding
from engine.resharding.placement import Placement
from engine.resharding.plan import plan_rank
from engine.resharding.vllm import VllmSharding
from tests.engine.resharding.cases import Case, cases

many = settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
some = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
LLAMA = ModelShape("llama", 4, 64, 128, 8, 2, 8, 100, False)


def plans(case: Case):
    return [plan_rank(case.src, case.dst, rank, Placement(case.ranks_per_node)) for rank in range(case.world_size)]


@some
@given(case=cases())
def test_every_missing_element_arrives_exactly_once_from_a_rank_that_has_it(case):
    assert_exact(case)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@many
@given(case=cases())
def test_two_thousand_plans_are_exact(case):
    assert_exact(case)


def assert_exact(case):
    held = {rank: boxes(case.src, rank) for rank in case.src.ranks}
    all_plans = plans(case)
    for there, here in (("sends", "recvs"), ("forwards", "relayed")):
        sent, received = (Counter(t for plan in all_plans for t in getattr(plan, way)) for way in (there, here))
        assert sent == received
    for plan in all_plans:
        node = plan.placement.node
        fetched = {(t.tensor.name, t.box) for t in plan.recvs if node(t.src) != node(plan.rank)}
        assert all((t.tensor.name, t.box) in fetched and node(t.dst) == node(plan.rank) for t in plan.forwards)
        for t in plan.recvs:
            assert t.dst == plan.rank and any(intersect(box, t.box) == t.box for box in held[t.src][t.tensor.name])
        assert_covers_once(plan, boxes(case.dst, plan.rank) if plan.rank in case.dst.ranks else {})
        assert rank_cost(plan, 2).received == lower_bound(plan, 2)


def boxes(sharding, rank) -> dict:
    found: dict = {}
    for tensor, box in sharding.held(rank):
        found.setdefault(tensor.name, []).append(box)
    return found


def assert_covers_once(plan, wanted: dict) -> None:
    arrived: dict = {}
    for tensor, box in [*plan.local, *((t.tensor, t.box) for t in (*plan.recvs, *plan.relayed))]:
        arrived.setdefault(tensor.name, []).append(box)
    assert arrived.keys() == wanted.keys()
    for name, parts in arrived.items():
        assert sum(volume(box) for box in parts) == sum(volume(box) for box in wanted[name])
        for index, box in enumerate(parts):
            assert any(intersect(box, whole) == box for whole in wanted[name])
            assert not any(intersect(box, other) for other in parts[:index])


@some
@given(case=cases())
def test_transfers_between_two_ranks_are_in_the_same_order_at_both_ends(case):
    all_plans = plans(case)
    for src in all_plans:
        for dst in all_plans:
            assert [t for t in src.sends if t.dst == dst.rank] == [t for t in dst.recvs if t.src == src.rank]
            assert [t for t in src.forwards if t.dst == dst.rank] == [t for t in dst.relayed if t.src == src.rank]


@some
@given(case=cases())
def test_pieces_cover_what_a_rank_holds_and_no_parameter_element_twice(case):
    for sharding in (case.src, case.dst):
        for rank in sharding.ranks:
            holdings = sharding.holdings(rank)
            elements = Counter()
            for piece in holdings.pieces:
                assert 0 < volume(piece.box)
                elements[piece.tensor] += volume(piece.box)
                whole = full_box(holdings.params[piece.param])
                assert intersect(area(piece), whole) == area(piece)
            copies = {name: sum(volume(box) for box in own) for name, own in boxes(sharding, rank).items()}
            assert elements == copies
            assert_no_overlap(holdings)


def assert_no_overlap(holdings) -> None:
    placed: dict = {}
    for piece in holdings.pieces:
        placed.setdefault(piece.param, []).append(area(piece))
    for areas in placed.values():
        for index, own in enumerate(areas):
            assert not any(intersect(own, other) for other in areas[:index])


def area(piece):
    """The piece's place in its parameter, as a box."""
    sizes = [1] * (len(piece.at) - len(piece.box)) + [stop - start for start, stop in piece.box]
    return tuple((at, at + size) for at, size in zip(piece.at, sizes, strict=True))


@some
@given(case=cases())
def test_bytes_into_a_node_are_what_its_ranks_need_minus_what_they_have_together(case):
    all_plans = plans(case)
    for node in {plan.placement.node(plan.rank) for plan in all_plans}:
        own = [plan for plan in all_plans if plan.placement.node(plan.rank) == node]
        entered = sum(rank_cost(plan, 1).received_far for plan in own)
        needed = masks(case.dst, own)
        for name, held in masks(case.src, own).items():
            needed[name] &= ~held
        assert entered == sum(int(mask.sum()) for mask in needed.values())


def masks(sharding, some_plans) -> dict:
    """Which elements of each tensor these ranks hold together."""
    found = {name: np.zeros(tensor.shape, dtype=bool) for name, tensor in sharding.tensors.items()}
    for rank in (plan.rank for plan in some_plans if plan.rank in sharding.ranks):
        for tensor, box in sharding.held(rank):
            found[tensor.name][tuple(slice(*extent) for extent in box)] = True
    return found


@pytest.mark.parametrize(("train", "serve"), [((2, 1, 4), 4), ((2, 2, 2), 1), ((1, 1, 8), 8), ((4, 1, 2), 2)])
def test_replicas_share_the_sending(train, serve):
    shape = ModelShape("llama", 8, 64, 128, 8, 8, 8, 128, False)
    tp, pp, dp = train
    src = MegatronSharding(shape, ParallelLayout(tp=tp, pp=pp, dp=dp))
    dst = VllmSharding(shape, GenerationLayout(serve), 8)
    for ranks_per_node in (1, 4, 8):
        costs = [rank_cost(plan_rank(src, dst, rank, Placement(ranks_per_node)), 2) for rank in range(8)]
        received = sum(cost.received for cost in costs)
        # Alike holders of alike slices: the busiest sender does at most a tenth more than its share of a stage.
        assert max(cost.sent for cost in costs) <= 1.1 * max(received / 8, max(cost.received for cost in costs))


def test_a_plan_moves_nothing_between_equal_layouts():
    sharding = MegatronSharding(LLAMA, ParallelLayout(tp=2, pp=2, dp=2))
    for rank in range(8):
        plan = plan_rank(sharding, sharding, rank)
        assert not plan.sends and not plan.recvs and plan.local


def test_a_tensor_the_source_lacks_is_named():
    critic = MegatronSharding(LLAMA, ParallelLayout(), critic=True)
    with pytest.raises(ReshardError, match=r"lm_head.weight: vLLM tp=1 needs it and Megatron"):
        plan_rank(critic, VllmSharding(LLAMA, GenerationLayout(1), 1), 0)


def test_another_model_is_refused_with_both_shapes():
    wider = ModelShape("llama", 4, 128, 128, 8, 2, 8, 100, False)
    with pytest.raises(ReshardError, match=r"embed_tokens.weight: .*\(100, 64\), .*\(100, 128\)"):
        plan_rank(MegatronSharding(LLAMA, ParallelLayout()), VllmSharding(wider, GenerationLayout(1), 1), 0)


@pytest.mark.parametrize(("build", "numbers"), [
    (lambda: MegatronSharding(LLAMA, ParallelLayout(tp=3)), "tp=3 does not divide 8 attention heads"),
    (lambda: MegatronSharding(LLAMA, ParallelLayout(pp=3)), "pp=3 does not divide 4 layers"),
    (lambda: MegatronSharding(LLAMA, ParallelLayout(pp=4), virtual_stages=2), "4 layers do not divide over pp=4 x 2"),
    (lambda: MegatronSharding(LLAMA, ParallelLayout(ep=2, dp=3)), "ep=2 must divide dp=3"),
    (lambda: VllmSharding(LLAMA, GenerationLayout(16), 16), "tp=16 does not divide 8 attention heads"),
    (lambda: VllmSharding(LLAMA, GenerationLayout(4), 6), "tp=4 does not divide the 6 ranks"),
    (lambda: VllmSharding(LLAMA, GenerationLayout(2), 4).on([0, 1, 2]), "needs 4 distinct ranks"),
    (lambda: VllmSharding(LLAMA, GenerationLayout(2), 4).on([0, 1, 2, 2]), "needs 4 distinct ranks"),
    (lambda: MegatronSharding(LLAMA, ParallelLayout()).holdings(1), "rank 1 is not one of its 1 ranks"),
])
def test_layouts_that_cannot_hold_the_model_are_refused_with_the_numbers(build, numbers):
    with pytest.raises(LayoutError, match=numbers):
        build()
