"""One trained model in a directory, as Megatron's distributed checkpoint: loads under any layout.

Always sharded `fully_reshardable`: optimizer state is written in the shapes of the parameters, not of dp's buffers.
"""

import io
import queue
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import SavePlan, SavePlanner
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX
from torch.distributed.checkpoint.planner import ReadItem, WriteItemType

from engine.backends.megatron.index_file import check_index
from engine.backends.megatron.model import CausalLM
from engine.backends.megatron.optimizer import Optimizer
from engine.backends.megatron.staging import Staging
from engine.errors import StoreError
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.base import StrategyAction, register_default_strategy
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME, TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

SHARDING = {"distrib_optim_sharding_type": "fully_reshardable", "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True}
FORMAT = ("torch_dist", 1)
STATES = ("param", "exp_avg", "exp_avg_sq")


class _Writer(FileSystemWriterAsync):
    """Names one file a rank and what goes into it. Megatron's own also copies, all of which the training waits for."""

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        items = [(item, planner.resolve_data(item)) for item in plan.items]
        texts = [pair for pair in items if pair[0].type == WriteItemType.BYTE_IO]
        tensors = [(item, data.detach()) for item, data in items if item.type != WriteItemType.BYTE_IO]
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        self.write_buckets = [(str(Path(self.checkpoint_dir) / name), name, (texts, tensors))] if items else []


class _LoadPlanner(torch_strategy.MCoreLoadPlanner):
    """Unpickles tensors and plain values only. Torch's own would run what a foreign file of bytes holds."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        content = torch.load(value, weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], content)


# The strategies make their writer and their planner by these names.
torch_strategy.FileSystemWriterAsync = _Writer
torch_strategy.MCoreLoadPlanner = _LoadPlanner


class _Planned(TorchDistSaveShardedStrategy):
    """Keeps what Megatron planned to write and writes nothing.

    Megatron forks writers, which may deadlock beside vLLM's threads, collects their results through a spawned manager,
    which imports `__main__` again (13 s), and finishes with collectives of the training's own groups, which a thread
    beside the training must not use.
    """

    writer: _Writer
    metadata: Any
    """Of all ranks' files; on the first rank only."""

    def _get_save_and_finalize_callbacks(self, writer: _Writer, save_state_dict_ret: Any) -> AsyncRequest:
        self.writer, self.metadata = writer, save_state_dict_ret[1]
        return AsyncRequest(None, (), [])


class _Common(TorchCommonSaveStrategy):
    """Keeps what all ranks have in common. Megatron would write it here and now, on the first rank alone: a full disk
    would leave the others waiting for it."""

    content = b""

    def save_common(self, common_state_dict: Any, checkpoint_dir: str | Path) -> None:
        buffer = io.BytesIO()
        torch.save(common_state_dict, buffer)
        self.content = buffer.getvalue()


@dataclass
class ModelSnapshot:
    """One model's state in CPU memory, to be written while the model trains on. Needs no collectives."""

    directory: Path
    plan: _Planned
    common: bytes
    buckets: list[Any]

    def write(self) -> list[Any]:
        """Write this rank's file; what `seal` needs to know of it.

        Raises:
            OSError: it could not be written.
        """
        results: list[Any] = []
        for index, (path, name, (texts, tensors)) in enumerate(self.buckets):
            outbox: queue.Queue = queue.Queue()
            running: queue.Queue = queue.Queue()
            running.put(index)
            # One by one: torch saves the whole storage that a tensor is a part of.
            whole = ((item, tensor.clone() if _is_part(tensor) else tensor) for item, tensor in tensors)
            _Writer.write_preloaded_data(
                [self.plan.writer.transforms], index, (path, name, (texts, whole)), outbox, running, use_fsync=True)
            _, written = outbox.get()
            if isinstance(written, Exception):
                raise written
            results += written
        self.buckets = []
        return results

    def seal(self, written: list[list[Any]]) -> None:
        """Write what all ranks have in common, and the index of their files; on the first rank, when all have written.

        Args:
            written: what `write` returned on every rank.
        """
        (self.directory / COMMON_STATE_FNAME).write_bytes(self.common)
        self.plan.writer.finish(self.plan.metadata, written)
        save_config(CheckpointingConfig(*FORMAT), str(self.directory))


def snapshot_model(directory: Path, network: CausalLM, optimizer: Optimizer, staging: Staging) -> ModelSnapshot:
    """Copy parameters, optimizer state and step count to CPU memory. Every rank calls it.

    Args:
        directory: empty, on a file system that all ranks share.
        network, optimizer: this rank's part.
        staging: where to; the snapshot before this one must have been written.
    Raises:
        StoreError: the directory cannot be written.
    """
    group = optimizer.wrapped.dp_cp_group
    metadata = {**SHARDING, "dp_cp_group": group}
    staging.restart()
    for part in optimizer.parts:
        _repair(part, staging)
    model_state = network.sharded_state_dict(metadata=metadata)
    state = {
        "model": model_state,
        "optimizer": optimizer.megatron.sharded_state_dict(model_state, is_loading=False, metadata=metadata),
        "steps": optimizer.steps,
        "skipped_in_a_row": optimizer.skipped_in_a_row,
    }
    plan, common = _Planned(*FORMAT), _Common("torch", 1)
    register_default_strategy(StrategyAction.SAVE_COMMON, "torch", 1, common)
    try:
        dist_checkpointing.save(
            state, str(directory), FullyParallelSaveStrategyWrapper(plan, group), async_sharded_save=True,
            content_metadata=dict(SHARDING))
    except CheckpointException as error:
        reasons = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())
        raise StoreError(f"checkpoint {directory}: {reasons or 'another rank could not write'}") from None
    except OSError as error:
        raise StoreError(f"checkpoint {error.filename or directory}: {error.strerror or error}") from None
    buckets, plan.writer.write_buckets = plan.writer.write_buckets, []
    return ModelSnapshot(directory, plan, common.content, copied(
        buckets, _storages(network, optimizer), staging, shared=group.size() > 1))


def copied(buckets: list[Any], live: set[int], staging: Staging, *, shared: bool) -> list[Any]:
    """The buckets in CPU memory that nobody else writes to.

    What was gathered is a copy already; a tensor of the training itself would be written as it is by then.

    Args:
        live: addresses of the storages that the training goes on with.
        staging: where copies go.
        shared: other ranks write parts of what was gathered: only this rank's part stays in its memory.
    """
    def own(tensor: torch.Tensor) -> torch.Tensor:
        is_live = tensor.untyped_storage().data_ptr() in live
        return staging.copy(tensor) if is_live or (shared and _is_part(tensor)) else tensor

    return [(path, key, (texts, [(item, own(tensor)) for item, tensor in tensors]))
            for path, key, (texts, tensors) in _Writer.preload_tensors(buckets)]


def _is_part(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().size() != tensor.numel() * tensor.itemsize


def _storages(network: CausalLM, optimizer: Optimizer) -> set[int]:
    tensors = [*network.parameters(), *network.buffers()]
    for part in optimizer.parts:
        tensors += [param for group in part.optimizer.param_groups for param in group["params"]]
        tensors += [value for state in part.optimizer.state.values() for value in state.values()]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if isinstance(tensor, torch.Tensor)}


def load_model(directory: Path, network: CausalLM, optimizer: Optimizer) -> None:
    """Read what a snapshot wrote, under this or another layout. Every rank calls it.

    The optimizer's settings stay those of the job's spec; its moments and step count are read.

    Raises:
        ModelError: the files could do more than hold numbers.
    """
    check_index(directory)
    metadata = {**SHARDING, "dp_cp_group": optimizer.wrapped.dp_cp_group}
    settings = [{name: value for name, value in group.items() if name != "params"}
                for group in optimizer.megatron.param_groups]
    for part in optimizer.parts:
        _repair(part, None)
    model_state = network.sharded_state_dict(metadata=metadata)
    state = dist_checkpointing.load(
        {
            "model": model_state,
            "optimizer": optimizer.megatron.sharded_state_dict(model_state, is_loading=True, metadata=metadata),
        },
        str(directory),
    )
    with torch.no_grad():
        network.load_state_dict(state["model"])
        optimizer.megatron.load_state_dict(state["optimizer"])
    optimizer.steps, optimizer.skipped_in_a_row = state["steps"], state["skipped_in_a_row"]
    for group, own in zip(optimizer.megatron.param_groups, settings, strict=True):
        group.update(own)
    for part in optimizer.parts:
        for adam_state in part.optimizer.state.values():
            # Megatron leaves one tensor shared by all parameters: each step would count once for every one of them.
            adam_state["step"] = adam_state["step"].clone()


def _repair(part: DistributedOptimizer, staging: Staging | None) -> None:
    """Replace two methods of one optimizer that are wrong in megatron-core 0.16.1; see `_gathered`."""

    def fill(model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        # Megatron's own looks for a tensor `step`, which it keeps elsewhere when Adam is torch's.
        group, order = part.model_param_group_index_map[model_param]
        main_param = part.optimizer.param_groups[group]["params"][order]
        for name, target in {"param": main_param.data, **part.optimizer.state[main_param]}.items():
            if name != "step":
                target.copy_(tensors[name])

    def gather(**options: Any) -> dict[Any, Any]:
        return _gathered(part, staging)

    part._set_main_param_and_optimizer_states = fill
    part.get_parameter_state_dp_zero = gather


@torch.no_grad()
def _gathered(part: DistributedOptimizer, staging: Staging | None) -> dict[Any, Any]:
    """Parameters and moments of all data-parallel ranks in CPU memory, each buffer as one flat tensor a state.

    Megatron's own copies everything five times, all of which the training waits for, and cuts the padding between
    buckets out but looks parameters up by their padded places: a buffer has several buckets when the embedding is tied
    and pp > 1, and then states of other parameters were read shifted.

    Args: staging: where one rank alone copies the states to; what several gather does not stay. None: only the shapes
        are wanted, for loading.
    """
    alone = part.data_parallel_group.size() == 1
    empty = staging.empty if staging and alone else torch.empty
    state: dict[Any, Any] = {}
    for index, (buffer, ranges) in enumerate(zip(part.buffers, part.gbuf_ranges, strict=True)):
        ((dtype, of_buckets),) = ranges.items()
        whole = {name: empty(buffer.numel, dtype=torch.float32) for name in STATES}
        for bucket, of_bucket in zip(buffer.buckets, of_buckets, strict=True) if staging else ():
            tensors = [(part._get_main_param_and_optimizer_states(param), places["gbuf_local"])
                       for param, places in of_bucket["param_map"].items()]
            for name in STATES:
                target = whole[name][bucket.offset : bucket.offset + bucket.grad_data.numel()]
                _gather(target, [(states[name], place) for states, place in tensors], part.data_parallel_group)
        state[index] = {dtype: whole}
    return state


def _gather(target: torch.Tensor, own: list[tuple[torch.Tensor, Any]], group: dist.ProcessGroup) -> None:
    """All ranks' equal parts of a bucket, one after the other in `target`; this rank's is made of tensors at places."""
    size = group.size()
    part = target if size == 1 else target.new_empty(len(target) // size, device=torch.cuda.current_device())
    for tensor, place in own:
        part[place.start : place.end].copy_(tensor)
    if size > 1:
        received = part.new_empty(len(target))
        dist.all_gather_into_tensor(received, part, group)
        target.copy_(received)
