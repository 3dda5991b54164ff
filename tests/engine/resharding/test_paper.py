"""The figures of the HybridFlow paper (arXiv:2409.19256, table 2), by planning each strategy."""

import pytest

from engine.layout import ModelShape, ParallelLayout
from engine.resharding.baselines import strategy_share
from engine.resharding.plan import grouped_ranks

# Norms, the only weights that are not cut, are a hundred-thousandth of this model.
SHAPE = ModelShape("llama", 8, 8192, 32768, 64, 64, 128, 32768, False)
CASES = [
    # training pp-tp-dp, generation tp, units of M received: DS-Chat, HybridFlow-V, HybridFlow
    ((1, 4, 2), 2, (0.875, 0.75, 0.25)),
    ((1, 8, 2), 2, (0.9375, 0.875, 0.375)),
    ((1, 8, 2), 8, (0.9375, 0.875, 0.0)),
    ((4, 8, 4), 8, (0.992, 0.969, 0.094)),
]


@pytest.mark.parametrize(("train", "tp", "received"), CASES)
def test_a_transition_receives_what_the_paper_says(train, tp, received):
    pp, train_tp, dp = train
    layout = ParallelLayout(tp=train_tp, pp=pp, dp=dp)
    generate = ParallelLayout(tp=tp, dp=layout.world_size // tp)
    shares = [strategy_share(name, SHAPE, layout, generate) for name in ("ds-chat", "hybridflow-v", "hybridflow")]
    assert [share.received for share in shares] == pytest.approx(received, abs=5e-4)
    model_parallel = layout.tp * layout.pp
    assert [share.received for share in shares] == pytest.approx(
        [1 - 1 / layout.world_size, 1 - 1 / model_parallel, (model_parallel - tp) / (tp * model_parallel)], abs=1e-4)
    assert [share.peak for share in shares] == pytest.approx([1, 1, 1 / tp], abs=1e-4)
    assert [share.redundant for share in shares] == pytest.approx(
        [1 / layout.world_size, 1 / model_parallel, 0], abs=1e-4)


def test_generation_with_pipeline_stages_keeps_every_training_shard_too():
    train, generate = ParallelLayout(tp=4, pp=4, dp=2), ParallelLayout(tp=2, pp=2, dp=8)
    share = strategy_share("hybridflow", SHAPE, train, generate)
    assert share.redundant == 0 and share.received == pytest.approx((16 - 4) / (4 * 16), abs=1e-4)


def test_groups_of_neighbours_overlap_less_than_the_papers_groups():
    train, generate = ParallelLayout(tp=4, dp=2), ParallelLayout(tp=2, dp=4)
    neighbours, paper = (strategy_share(name, SHAPE, train, generate) for name in ("neighbours", "hybridflow"))
    assert neighbours.received == pytest.approx(0.375, abs=1e-4) and neighbours.redundant > 0.1
    assert paper.received == pytest.approx(0.25, abs=1e-4)


def test_the_papers_grouping_for_its_own_example():
    # Figure 8b: training tp 4, dp 2; generation tp 2: groups {0, 2}, {1, 3}, {4, 6}, {5, 7}.
    assert grouped_ranks(4, 1, 8, 2) == (0, 2, 1, 3, 4, 6, 5, 7)
