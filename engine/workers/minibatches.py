"""Epochs and minibatches: what the actor's and the critic's updates have in common."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from engine.backends.megatron.heads import OutputFn, Outputs
from engine.backends.megatron.trainer import StepReport, TrainedModel

Metrics = dict[str, float]
Sums = dict[str, Tensor]
MicrobatchLoss = Callable[[Outputs, TensorDict, Tensor], tuple[Tensor, Sums]]
"""(outputs, microbatch, denominator of the whole minibatch) -> (loss, sums to add up)."""


class Objective(Protocol):
    """The parts of an objective (`engine.dataflows.objectives`) that do not depend on the role."""

    def denominator(self, batch: TensorDict) -> Tensor:
        """Scalar float64: this part's share of the minibatch's denominator."""

    def metrics(self, sums: dict[str, float]) -> Metrics:
        """Metrics of one optimizer step from its summed sums, named `role/*`."""


@dataclass(frozen=True)
class Update:
    """How one role learns from a batch."""

    role: str
    """Prefix of the metrics."""
    objective: Objective
    output_fn: OutputFn
    """What the loss is computed from."""
    loss: MicrobatchLoss
    epochs: int
    """Passes over the batch."""

    def run(self, model: TrainedModel, batch: TensorDict) -> Metrics:
        """One optimizer step for each minibatch of each epoch.

        Args:
            model: what is trained.
            batch: this replica's rows, marked by `minibatch_ids`.
        Returns:
            Means over the steps that were applied, the same on every rank; the last learning rate; skipped steps.
        Raises:
            NumericsError: three steps in a row were not finite.
        """
        minibatches = [batch[batch["minibatch_ids"] == index] for index in range(int(batch["minibatch_ids"].max()) + 1)]
        denominators = torch.stack([self.objective.denominator(minibatch) for minibatch in minibatches])
        dist.all_reduce(denominators, group=model.world.groups.dp)
        reports: list[StepReport] = []
        for _ in range(self.epochs):
            for minibatch, denominator in zip(minibatches, denominators, strict=True):
                reports.append(model.train_step(
                    minibatch, self.output_fn, lambda outputs, part, d=denominator: self.loss(outputs, part, d)))
        return _summarise(reports, self.objective, self.role)


def _summarise(reports: list[StepReport], objective: Objective, role: str) -> Metrics:
    values: dict[str, list[float]] = defaultdict(list)
    for report in reports:
        if report.skipped:
            continue
        for name, value in {**objective.metrics(report.sums), f"{role}/grad_norm": report.grad_norm}.items():
            values[name].append(value)
    metrics = {name: sum(numbers) / len(numbers) for name, numbers in values.items()}
    skipped = sum(report.skipped for report in reports)
    return metrics | {f"{role}/lr": reports[-1].lr, f"{role}/skipped_steps": float(skipped)}
