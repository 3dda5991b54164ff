"""Random models and pairs of layouts, drawn by hypothesis or from a seed."""

import itertools
import random
from dataclasses import dataclass

from hypothesis import strategies as st

from engine.errors import LayoutError
from engine.layout import GenerationLayout, ModelShape, ParallelLayout
from engine.resharding.fsdp import FsdpSharding
from engine.resharding.megatron import MegatronSharding
from engine.resharding.sharding import FullSharding, Sharding
from engine.resharding.vllm import VllmSharding

WORLD_SIZES = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True)
class Case:
    """Two layouts of one model on some ranks."""

    shape: ModelShape
    src: Sharding
    dst: Sharding
    world_size: int
    """Ranks numbered 0 .. world_size - 1 include all of both layouts."""
    ranks_per_node: int


class Draw:
    """Random choices from a seed, or from hypothesis."""

    def __init__(self, choose):
        self.choose = choose

    def shape(self) -> ModelShape:
        family = self.choose(["llama", "qwen2", "qwen3", "mixtral", "qwen3_moe"])
        heads = self.choose([1, 2, 4, 6, 8])
        kv_heads = self.choose([kv for kv in (1, 2, 3, 4, 8) if heads % kv == 0])
        head_dim, moe = self.choose([2, 4]), family in ("mixtral", "qwen3_moe")
        width = 24
        return ModelShape(
            family=family, num_layers=self.choose([1, 2, 3, 4, 5, 6, 7]), hidden_size=self.choose([4, 6]),
            ffn_hidden_size=width, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
            vocab_size=self.choose([3, 17, 64, 65, 130]), tied_embeddings=self.choose([False, True]),
            qkv_bias=family == "qwen2", o_bias=family == "llama" and self.choose([False, True]),
            mlp_bias=family == "llama" and self.choose([False, True]), qk_norm=family.startswith("qwen3"),
            num_experts=self.choose([2, 4, 8]) if moe else 0, moe_ffn_hidden_size=width if moe else 0)

    def sharding(self, shape: ModelShape, world_size: int) -> Sharding:
        """A layout of `world_size` ranks that can hold the model; FSDP always can."""
        kind = self.choose(["megatron", "megatron", "vllm", "vllm", "fsdp", "full"])
        if kind == "fsdp":
            return FsdpSharding(shape, world_size)
        if kind == "full":
            return FullSharding(FsdpSharding(shape, 1).tensors, range(world_size))
        options = self._vllm(shape, world_size) if kind == "vllm" else self._megatron(shape, world_size)
        return self.choose(options) if options else FsdpSharding(shape, world_size)

    def _vllm(self, shape: ModelShape, world_size: int) -> list[Sharding]:
        found = []
        for tp, spread in itertools.product((1, 2, 4, 8), (False, True) if shape.num_experts else (False,)):
            found += _possible(VllmSharding, shape, GenerationLayout(tp), world_size, expert_parallel=spread)
        return found

    def _megatron(self, shape: ModelShape, world_size: int) -> list[Sharding]:
        sizes = range(1, world_size + 1)
        layouts = [ParallelLayout(tp=tp, pp=pp, dp=dp, ep=ep)
                   for tp, pp, dp, ep in itertools.product(sizes, sizes, sizes, (1, 2, 4))
                   if tp * pp * dp == world_size]
        found = []
        for layout, options in itertools.product(layouts, ({}, {"vocab_multiple": 16}, {"virtual_stages": 2})):
            found += _possible(MegatronSharding, shape, layout, **options)
        return found

    def case(self) -> Case:
        """Layouts on the same ranks, overlapping ones, or disjoint ones."""
        shape, size = self.shape(), self.choose(WORLD_SIZES)
        where = self.choose(["same", "same", "permuted", "disjoint", "overlapping"])
        if where == "same":
            return self._pair(shape, (range(size), range(size)), size)
        if where == "permuted":
            order = list(range(size))
            order = order[size // 2:][::-1] + order[:size // 2]
            return self._pair(shape, (range(size), order), size)
        src_size = self.choose([n for n in WORLD_SIZES if n < 8])
        dst_size = self.choose([n for n in WORLD_SIZES if n + src_size <= 8])
        start = src_size if where == "disjoint" else src_size // 2
        dst_ranks = range(start, start + dst_size)
        return self._pair(shape, (range(src_size), dst_ranks), max(src_size, dst_ranks.stop))

    def _pair(self, shape: ModelShape, ranks: tuple, world_size: int) -> Case:
        src, dst = (self.sharding(shape, len(own)).on(own) for own in ranks)
        return Case(shape, src, dst, world_size, self.choose([1, 2, 4, 8]))


def _possible(kind: type, *args, **options) -> list[Sharding]:
    try:
        return [kind(*args, **options)]
    except LayoutError:
        return []


@st.composite
def cases(draw) -> Case:
    """Hypothesis strategy."""
    return Draw(lambda options: draw(st.sampled_from(list(options)))).case()


def seeded_cases(count: int, seed: int) -> list[Case]:
    """The same cases every time, without hypothesis: what other processes can draw as well."""
    chooser = random.Random(seed)
    return [Draw(lambda options: chooser.choice(list(options))).case() for _ in range(count)]
