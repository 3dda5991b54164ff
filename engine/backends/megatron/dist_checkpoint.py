"""One trained model in a directory, as Megatron's distributed checkpoint: loads under any layout.

Always sharded `fully_reshardable`: optimizer state is written in the shapes of the parameters, not of dp's buffers.
"""

import queue
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from engine.backends.megatron.model import CausalLM
from engine.backends.megatron.optimizer import Optimizer
from engine.errors import StoreError
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

SHARDING = {"distrib_optim_sharding_type": "fully_reshardable", "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True}


class _SaveInProcess(TorchDistSaveShardedStrategy):
    """Writes from the calling process. Megatron forks writers, which may deadlock beside vLLM's threads, and collects
    their results through a spawned manager, which imports `__main__` again (13 s)."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)
        filesystem_async._results_queue = queue.Queue()

    def _get_save_and_finalize_callbacks(self, writer: FileSystemWriterAsync, save_state_dict_ret: Any) -> AsyncRequest:
        request = super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret)
        return AsyncRequest(_write, (writer,), request.finalize_fns)


def _write(writer: FileSystemWriterAsync) -> None:
    results: dict[int, Any] = {}
    for index, bucket in enumerate(FileSystemWriterAsync.preload_tensors(writer.write_buckets or [])):
        outbox: queue.Queue = queue.Queue()
        running: queue.Queue = queue.Queue()
        running.put(index)
        FileSystemWriterAsync.write_preloaded_data([writer.transforms], index, bucket, outbox, running, use_fsync=True)
        _, result = outbox.get()
        if isinstance(result, Exception):
            # Megatron's finalizer hands it to every rank, so that none waits for this one.
            writer.results_queue.put(result)
            return
        results[index] = result
    if writer.results_queue is not None:
        writer.results_queue.put(results)


def save_model(directory: Path, network: CausalLM, optimizer: Optimizer) -> None:
    """Write parameters, optimizer state and step count. Every rank calls it.

    Args:
        directory: empty, on a file system that all ranks share.
        network, optimizer: this rank's part.
    Raises:
        StoreError: a file could not be written; raised on every rank.
    """
    group = optimizer.wrapped.dp_cp_group
    metadata = {**SHARDING, "dp_cp_group": group}
    for part in optimizer.parts:
        _repair(part)
    model_state = network.sharded_state_dict(metadata=metadata)
    state = {
        "model": model_state,
        "optimizer": optimizer.megatron.sharded_state_dict(model_state, is_loading=False, metadata=metadata),
        "steps": optimizer.steps,
    }
    try:
        dist_checkpointing.save(
            state, str(directory), FullyParallelSaveStrategyWrapper(_SaveInProcess(), group),
            content_metadata=dict(SHARDING))
    except CheckpointException as error:
        reasons = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())
        raise StoreError(f"checkpoint {directory}: {reasons or 'another rank could not write'}") from None


def load_model(directory: Path, network: CausalLM, optimizer: Optimizer) -> None:
    """Read what `save_model` wrote, under this or another layout. Every rank calls it.

    The optimizer's settings stay those of the job's spec; its moments and step count are read.
    """
    metadata = {**SHARDING, "dp_cp_group": optimizer.wrapped.dp_cp_group}
    settings = [{name: value for name, value in group.items() if name != "params"}
                for group in optimizer.megatron.param_groups]
    for part in optimizer.parts:
        _repair(part)
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
    optimizer.steps = state["steps"]
    for group, own in zip(optimizer.megatron.param_groups, settings, strict=True):
        group.update(own)
    for part in optimizer.parts:
        for adam_state in part.optimizer.state.values():
            # Megatron leaves one tensor shared by all parameters: each step would count once for every one of them.
            adam_state["step"] = adam_state["step"].clone()


def _repair(part: DistributedOptimizer) -> None:
    """Replace two methods of one optimizer that are wrong in megatron-core 0.16.1."""

    def fill(model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        # Megatron's own looks for a tensor `step`, which it keeps elsewhere when Adam is torch's.
        group, order = part.model_param_group_index_map[model_param]
        main_param = part.optimizer.param_groups[group]["params"][order]
        for name, target in {"param": main_param.data, **part.optimizer.state[main_param]}.items():
            if name != "step":
                target.copy_(tensors[name])

    def gather(**options: Any) -> Any:
        # Megatron cuts the padding between buckets out but looks parameters up by their padded places. A buffer has
        # several buckets when the embedding is tied and pp > 1; then states of other parameters were read shifted.
        state = DistributedOptimizer.get_parameter_state_dp_zero(part, **options)
        for index, buffer in enumerate(part.buffers):
            for tensors in state[index].values():
                for name in ("param", "exp_avg", "exp_avg_sq"):
                    tensors[name] = _spread(tensors[name], buffer)
        return state

    part._set_main_param_and_optimizer_states = fill
    part.get_parameter_state_dp_zero = gather


def _spread(dense: torch.Tensor, buffer: Any) -> torch.Tensor:
    """Put each bucket's elements where they stand in the buffer."""
    if len(buffer.buckets) == 1:
        return dense
    spread, start = dense.new_zeros(buffer.numel), 0
    for bucket in buffer.buckets:
        spread[bucket.offset : bucket.offset + bucket.numel_unpadded] = dense[start : start + bucket.numel_unpadded]
        start += bucket.numel_unpadded
    return spread
