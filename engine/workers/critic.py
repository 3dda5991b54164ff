"""The critic: the value of every state that a response token is chosen in."""

from dataclasses import dataclass

from tensordict import TensorDict

from engine.backends.megatron.heads import value_head
from engine.backends.megatron.trainer import TrainedModel
from engine.dataflows.objectives import CriticObjective
from engine.workers.minibatches import Metrics, Update


@dataclass
class Critic:
    """Values and updates of the value function; every rank calls the methods with its replica's rows."""

    model: TrainedModel
    objective: CriticObjective
    epochs: int = 1

    def values(self, batch: TensorDict) -> TensorDict:
        """The batch with `values` [B, R]: slot r is the value before response token r."""
        batch["values"] = self.model.forward(batch, value_head)["values"]
        return batch

    def update(self, batch: TensorDict) -> Metrics:
        """All epochs and minibatches; metrics `critic/*`, the same on every rank.

        Raises:
            NumericsError: three optimizer steps in a row were not finite.
        """
        update = Update("critic", self.objective, value_head, self._loss, self.epochs)
        return update.run(self.model, batch)

    def _loss(self, outputs, microbatch, denominator):
        return self.objective.loss(microbatch, outputs["values"], denominator)
