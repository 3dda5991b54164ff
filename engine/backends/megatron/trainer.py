"""A model on its ranks: forward passes over a replica's rows, and exact optimizer steps."""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from engine.backends.megatron.dist_checkpoint import ModelSnapshot, load_model, snapshot_model
from engine.backends.megatron.heads import OutputFn, Outputs
from engine.backends.megatron.model import CausalLM, Head, build_model
from engine.backends.megatron.optimizer import Optimizer
from engine.backends.megatron.parallel import World
from engine.backends.megatron.sequences import Microbatch, divide, microbatch
from engine.backends.megatron.staging import Staging
from engine.batch import response_mask
from engine.errors import NumericsError
from engine.layout import read_model_shape
from engine.resharding.load import load_hf
from engine.resharding.megatron import MegatronSharding, RewardModelSharding
from engine.spec.train import OptimizerSpec
from megatron.core.pipeline_parallel import get_forward_backward_func

log = logging.getLogger(__name__)

LossFn = Callable[[Outputs, TensorDict], tuple[Tensor, dict[str, Tensor]]]
"""(outputs of a microbatch, the microbatch) -> (loss, sums), both as contributions that add up over microbatches and
ranks: the loss is a sum over tokens or rows, divided by the denominator of the whole minibatch over all ranks."""

MAX_SKIPPED_IN_A_ROW = 3


@dataclass
class StepReport:
    """What one optimizer step did; the same on every rank."""

    loss: float
    grad_norm: float
    """Before clipping."""
    lr: float
    skipped: bool
    """Loss or gradient was not finite: parameters and optimizer are as before."""
    sums: dict[str, float] = field(default_factory=dict)
    """What the loss function returned beside the loss, added up over microbatches and replicas."""


class Model:
    """One role's model: this rank's part of it."""

    def __init__(self, world: World, network: CausalLM, token_budget: int):
        """Wrap a built network.

        Args:
            world: the rank's place.
            network: this rank's part, parameters loaded.
            token_budget: tokens of one microbatch, padding included.
        """
        self.world = world
        self.network = network
        self.token_budget = token_budget

    def params(self) -> dict[str, Tensor]:
        """This rank's parameters by Megatron's names: what `engine.resharding` reads and writes in place."""
        return dict(self.network.named_parameters())

    @torch.no_grad()
    def forward(self, batch: TensorDict, output_fn: OutputFn, *, everywhere: bool = True) -> Outputs:
        """Compute per-token outputs of the replica's rows.

        Args:
            batch: the rows of this replica, the same on all its ranks.
            output_fn: applied to each microbatch's hidden states on the last stage.
            everywhere: False leaves the outputs on the ranks of the last stage; others get none.
        Returns:
            Named [B, R] float32 tensors ([B, R, n] unless everywhere) in the order of the batch's rows, on its device.
        """
        divided = divide(batch, self.token_budget)
        pieces = self._run(batch, divided, output_fn)
        outputs: Outputs = {}
        for sequences, piece in zip(divided, pieces, strict=False):
            rows = [row for sequence in sequences for row in sequence]
            for name, value in piece.items():
                whole = outputs.setdefault(
                    name, value.new_zeros(*batch["rollout_logprobs"].shape, *value.shape[2:]))
                whole[rows, : value.shape[1]] = value
        device = batch["input_ids"].device
        if everywhere:
            outputs = self._from_last_stage(outputs, batch)
        return {name: value.to(device) for name, value in outputs.items()}

    def _from_last_stage(self, outputs: Outputs, batch: TensorDict) -> Outputs:
        if self.world.layout.pp == 1:
            return outputs
        names = [sorted(outputs)]
        dist.broadcast_object_list(names, src=self.world.last_stage_rank, group=self.world.groups.pp)
        shape = (len(names[0]), *batch["rollout_logprobs"].shape)
        if outputs:
            stacked = torch.stack([outputs[name] for name in names[0]])
        else:
            stacked = torch.empty(shape, device=self.world.device)
        dist.broadcast(stacked, src=self.world.last_stage_rank, group=self.world.groups.pp)
        return dict(zip(names[0], stacked.unbind(), strict=True))

    def _run(self, batch: TensorDict, divided: list[list[list[int]]], output_fn: OutputFn,
             loss_fn: LossFn | None = None) -> list[Any]:
        """Run Megatron's schedule; on the last stage, the outputs or (metrics, rows to blame) of each microbatch."""
        multiple = self.world.layout.tp if self.network.config.sequence_parallel else 1
        parts = (microbatch(batch, sequences, multiple, self.world.device) for sequences in divided)

        def forward_step(microbatches: Iterator[Microbatch], network: Any):
            part = next(microbatches)
            hidden = network(part.input_ids, part.tree)

            def outputs_of(hidden: Tensor, non_loss_data: bool = False):
                return output_fn(self.network, hidden, part.rows)

            def loss_of(hidden: Tensor):
                outputs = output_fn(self.network, hidden, part.rows)
                loss, sums = loss_fn(outputs, part.rows)
                bad = _rows_not_finite(loss, outputs, part.rows)
                # The schedule works on the loss in place: report a copy.
                report = {name: value.detach().clone() for name, value in {**sums, "loss": loss}.items()}
                return loss, torch.zeros((), dtype=torch.int), (report, bad)

            return hidden, loss_of if loss_fn else outputs_of

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=parts,
            model=[self.scheduled],
            num_microbatches=len(divided),
            # With variable lengths the stages tell each other the shapes; these two are not read.
            seq_length=1,
            micro_batch_size=1,
            forward_only=loss_fn is None,
            collect_non_loss_data=loss_fn is None,
        )

    @property
    def scheduled(self) -> Any:
        """The module Megatron's schedule runs: the network, or its data-parallel wrapper."""
        return self.network


class TrainedModel(Model):
    """A model with gradients and an optimizer."""

    def __init__(self, world: World, network: CausalLM, token_budget: int, spec: OptimizerSpec, total_steps: int):
        """Args: see `Model`; spec: optimizer; total_steps: optimizer steps of the run, for the schedule."""
        super().__init__(world, network, token_budget)
        self.optimizer = Optimizer(world, network, spec, total_steps)
        self._staging = Staging()

    @property
    def scheduled(self) -> Any:
        return self.optimizer.wrapped

    def snapshot(self, directory: Path) -> ModelSnapshot:
        """Copy parameters, optimizer and step count, to be written into an empty directory. Every rank calls it."""
        return snapshot_model(directory, self.network, self.optimizer, self._staging)

    def load(self, directory: Path) -> None:
        """Read what a snapshot wrote, under any layout. Every rank calls it."""
        load_model(directory, self.network, self.optimizer)

    def train_step(self, batch: TensorDict, output_fn: OutputFn, loss_fn: LossFn) -> StepReport:
        """One optimizer step on one minibatch.

        The gradient is that of the summed loss over all rows of all replicas, however they are divided.

        Args:
            batch: this replica's rows of the minibatch, the same on all ranks of the replica.
            output_fn: per-token outputs of a microbatch.
            loss_fn: its loss, see `LossFn`.
        Raises:
            NumericsError: the third step in a row that had to be skipped.
        """
        self.optimizer.zero_grad()
        pieces = self._run(batch, divide(batch, self.token_budget), output_fn, loss_fn)
        sums = self._add_up([sums for sums, _ in pieces])
        loss = sums["loss"]
        grad_norm = self.optimizer.grad_norm()
        skipped = not (math.isfinite(loss) and math.isfinite(grad_norm))
        lr = self.optimizer.step(grad_norm, skip=skipped)
        if skipped:
            self._report_skipped(loss, grad_norm, [sample for _, bad in pieces for sample in bad])
        else:
            self.optimizer.skipped_in_a_row = 0
        return StepReport(loss=loss, grad_norm=grad_norm, lr=lr, skipped=skipped, sums=sums)

    def _add_up(self, pieces: list[dict[str, Tensor]]) -> dict[str, float]:
        """Sum contributions over microbatches and replicas; every rank gets the result."""
        result: list[Any] = [None]
        if self.world.is_last_stage:
            names = list(pieces[0])
            sums = torch.stack([sum(piece[name].double() for piece in pieces) for name in names])
            dist.all_reduce(sums, group=self.world.groups.dp)
            result = [dict(zip(names, sums.tolist(), strict=True))]
        if self.world.layout.pp > 1:
            dist.broadcast_object_list(result, src=self.world.last_stage_rank, group=self.world.groups.pp)
        return result[0]

    def _report_skipped(self, loss: float, grad_norm: float, bad_samples: list[int]) -> None:
        gathered: list[Any] = [None] * self.world.size
        dist.all_gather_object(gathered, bad_samples)
        samples = sorted({sample for part in gathered for sample in part})
        self.optimizer.skipped_in_a_row += 1
        message = (f"optimizer step {self.optimizer.steps - 1} skipped: loss {loss}, gradient norm {grad_norm}; "
                   f"samples {samples or 'unknown'}")
        if self.optimizer.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise NumericsError(f"{message}; {self.optimizer.skipped_in_a_row} in a row")
        if self.world.rank == 0:
            log.warning(message)


def load_network(model_dir: str | Path, world: World, head: Head, *, scored: bool = False,
                 **options: Any) -> CausalLM:
    """Build this rank's part of a Hugging Face model and load its weights (a critic's value head starts at zero).

    Args: scored: the directory is a reward model's, and the value head is loaded from it; else see `build_model`.
    """
    network = build_model(model_dir, world, head, **options)
    shape = read_model_shape(model_dir)
    sharding = RewardModelSharding(shape, world.layout) if scored \
        else MegatronSharding(shape, world.layout, critic=head == "values")
    load_hf(model_dir, sharding.holdings(world.rank), dict(network.named_parameters()))
    return network


def _rows_not_finite(loss: Tensor, outputs: Outputs, microbatch: TensorDict) -> list[int]:
    """Sample ids to blame for a loss that is not finite: rows whose outputs are not, else all of the microbatch."""
    if torch.isfinite(loss):
        return []
    bad = torch.zeros(len(microbatch), dtype=torch.bool, device=loss.device)
    for value in outputs.values():
        bad |= ~torch.where(response_mask(microbatch), value.detach(), 0.0).isfinite().all(dim=1)
    return microbatch["sample_ids"][bad if bad.any() else ~bad].tolist()
