"""What the transition costs with the strategies HybridFlow compares itself to, by planning each. Pure; torch-free.

Source: HybridFlow, arXiv:2409.19256, sec. 5.4, table 2.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from engine.layout import ModelShape, ParallelLayout
from engine.resharding.boxes import volume
from engine.resharding.catalog import model_elements
from engine.resharding.fsdp import FsdpSharding
from engine.resharding.megatron import MegatronSharding
from engine.resharding.plan import RankPlan, grouped_ranks, plan_rank
from engine.resharding.sharding import FullSharding, Sharding

Strategy = Literal["ds-chat", "hybridflow-v", "hybridflow", "neighbours"]


@dataclass(frozen=True)
class Share:
    """A rank's transition, in units of M, the size of the model."""

    received: float
    peak: float
    """Generation weights the rank has at once."""
    redundant: float
    """Training weights that are in memory besides, because generation cannot use them where they lie."""


def strategy_share(strategy: Strategy, shape: ModelShape, train: ParallelLayout, generate: ParallelLayout) -> Share:
    """Mean over all ranks of what one transition costs.

    - ds-chat: ZeRO shards, gathered to the whole model on every rank.
    - hybridflow-v: tensor- and pipeline-parallel shards, gathered to the whole model within each replica.
    - hybridflow: each rank fetches what its generation shard lacks, generation groups chosen to overlap.
    - neighbours: the same with generation groups of consecutive ranks, as vLLM's launcher makes them.

    Args:
        generate: tp and pp of generation; its dp fills the same number of ranks.
    """
    src, dst = strategy_ends(strategy, shape, train, generate)
    keeps = strategy in ("hybridflow", "neighbours")
    shares = [_share(plan, keeps) for plan in (plan_rank(src, dst, rank) for rank in range(train.world_size))]
    size = model_elements(shape) * train.world_size
    return Share(*(sum(column) / size for column in zip(*shares, strict=True)))


def strategy_ends(strategy: Strategy, shape: ModelShape, train: ParallelLayout,
                  generate: ParallelLayout) -> tuple[Sharding, Sharding]:
    """Source and destination of a strategy's transition."""
    megatron = MegatronSharding(shape, train)
    if strategy in ("ds-chat", "hybridflow-v"):
        source = FsdpSharding(shape, train.world_size) if strategy == "ds-chat" else megatron
        return source, FullSharding(megatron.tensors, megatron.ranks)
    served = MegatronSharding(shape, generate)
    if strategy == "neighbours":
        return megatron, served
    return megatron, served.on(grouped_ranks(train.tp, train.pp, train.world_size, generate.tp, generate.pp))


def _share(plan: RankPlan, keeps: bool) -> tuple[int, int, int]:
    """Elements received, of the generation shard, and of the training shard that lies outside of it."""
    received = sum(volume(transfer.box) for transfer in (*plan.recvs, *plan.relayed))
    kept = sum(volume(box) for _, box in plan.local)
    trained = sum(_volumes(plan.src, plan.rank))
    return received, sum(_volumes(plan.dst, plan.rank)), trained - kept if keeps else trained


def _volumes(sharding: Sharding, rank: int) -> Iterator[int]:
    return (volume(box) for _, box in sharding.held(rank))
