"""The ranks of a job and their process groups: Megatron's, built from a `ParallelLayout` and checked against it."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from engine.errors import FaultError, LayoutError
from engine.layout import Coords, ParallelLayout
from engine.ranks import TIMEOUT_S, join_ranks, local_device
from megatron.core import parallel_state, tensor_parallel


@dataclass(frozen=True)
class Groups:
    """Process groups this rank is in."""

    world: dist.ProcessGroup
    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    dp: dist.ProcessGroup
    model_parallel: dist.ProcessGroup
    """tp x pp: the ranks of one replica."""


@dataclass(frozen=True)
class World:
    """One rank's place in the job."""

    layout: ParallelLayout
    rank: int
    device: torch.device
    groups: Groups

    @property
    def size(self) -> int:
        """Ranks of the job."""
        return self.layout.world_size

    @property
    def coords(self) -> Coords:
        """Where this rank stands in the layout."""
        return self.layout.coords(self.rank)

    @property
    def dp_rank(self) -> int:
        """Which replica this rank belongs to: it decides the rows it trains on."""
        return self.coords.dp

    @property
    def dp_size(self) -> int:
        """Number of replicas."""
        return self.layout.dp

    @property
    def is_lead(self) -> bool:
        """True on one rank of each replica (first tp rank of the first stage)."""
        return self.coords.tp == 0 and self.coords.pp == 0

    @property
    def is_first_stage(self) -> bool:
        """This rank holds the embedding."""
        return self.coords.pp == 0

    @property
    def is_last_stage(self) -> bool:
        """This rank holds the head: it alone computes logprobs, values and losses."""
        return self.coords.pp == self.layout.pp - 1

    @property
    def last_stage_rank(self) -> int:
        """Global rank of the last stage in this rank's pipeline."""
        coords = self.coords
        return self.layout.rank(Coords(tp=coords.tp, dp=coords.dp, pp=self.layout.pp - 1))


def start_world(layout: ParallelLayout, seed: int = 0, timeout_s: float = TIMEOUT_S) -> World:
    """Join the job's process group (torchrun's environment, or alone) and build Megatron's groups for `layout`.

    Calling it again with another layout rebuilds Megatron's groups; every rank must.

    Args:
        layout: how the ranks divide the model.
        seed: of the tensor-parallel random states; the same on every rank.
        timeout_s: after which a collective with a missing peer fails.
    Raises:
        LayoutError: the job has another number of ranks than the layout needs.
        FaultError: Megatron built other groups than the layout says.
    """
    join_ranks(timeout_s)
    size = dist.get_world_size()
    if size != layout.world_size:
        raise LayoutError(
            f"layout {layout} needs {layout.world_size} ranks but the job has {size}; "
            f"dp must be {size} / ({layout.tp} * {layout.pp})")
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    groups = Groups(
        world=dist.group.WORLD,
        tp=parallel_state.get_tensor_model_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        dp=parallel_state.get_data_parallel_group(),
        model_parallel=parallel_state.get_model_parallel_group(),
    )
    _check_groups(layout, groups)
    return World(layout=layout, rank=dist.get_rank(), device=local_device(), groups=groups)


def _check_groups(layout: ParallelLayout, groups: Groups) -> None:
    rank = dist.get_rank()
    here = layout.coords(rank)
    peers = [(other, layout.coords(other)) for other in range(layout.world_size)]
    expected = {
        "tp": [other for other, at in peers if (at.dp, at.pp) == (here.dp, here.pp)],
        "dp": [other for other, at in peers if (at.tp, at.pp) == (here.tp, here.pp)],
        "pp": [other for other, at in peers if (at.tp, at.dp) == (here.tp, here.dp)],
        "model_parallel": [other for other, at in peers if at.dp == here.dp],
    }
    for name, ranks in expected.items():
        built = sorted(dist.get_process_group_ranks(getattr(groups, name)))
        if built != ranks:
            raise FaultError(
                f"rank {rank}: Megatron's {name} group is {built}, layout {layout} says {ranks}; "
                f"engine/layout.py and megatron-core disagree on the order of ranks")


def random_states() -> dict[str, Tensor]:
    """Megatron's random states by purpose, for a checkpoint."""
    return dict(tensor_parallel.get_cuda_rng_tracker().get_states())


def set_random_states(states: dict[str, Tensor]) -> None:
    """Restore what `random_states` returned."""
    tensor_parallel.get_cuda_rng_tracker().set_states(states)
