"""The actor: the policy that is trained."""

from dataclasses import dataclass

from tensordict import TensorDict

from engine.backends.megatron.heads import LogprobHead
from engine.backends.megatron.trainer import TrainedModel
from engine.dataflows.objectives import ActorObjective
from engine.workers.minibatches import Metrics, Update


@dataclass
class Actor:
    """Logprobs and updates of the policy; every rank calls the methods with its replica's rows."""

    model: TrainedModel
    objective: ActorObjective
    temperature: float
    """Of the rollout: the policy is the distribution that was sampled from."""
    epochs: int = 1

    def logprobs(self, batch: TensorDict) -> TensorDict:
        """The batch with `old_logprobs` [B, R]."""
        batch["old_logprobs"] = self.model.forward(batch, LogprobHead(self.temperature))["logprobs"]
        return batch

    def update(self, batch: TensorDict) -> Metrics:
        """All epochs and minibatches; metrics `actor/*`, the same on every rank.

        Raises:
            NumericsError: three optimizer steps in a row were not finite.
        """
        head = LogprobHead(self.temperature, with_entropy=True)
        update = Update("actor", self.objective, head, self._loss, self.epochs)
        return update.run(self.model, batch)

    def _loss(self, outputs, microbatch, denominator):
        entropies = outputs["entropy"]
        if not self.objective.algorithm.entropy_coefficient:
            # Only reported: its gradient, zero times something, would cost a pass over the logits.
            entropies = entropies.detach()
        return self.objective.loss(microbatch, outputs["logprobs"], entropies, denominator)
