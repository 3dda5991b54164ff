"""The actor: the policy that is trained."""

from dataclasses import dataclass

from tensordict import TensorDict

from engine.backends.megatron.heads import FrozenPolicy, LogprobHead
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
    reference: FrozenPolicy | None = None
    """What the full KL is to; None: none is wanted."""

    def logprobs(self, batch: TensorDict) -> TensorDict:
        """The batch with `old_logprobs` and, with a reference, `full_kl`, both [B, R]."""
        outputs = self.model.forward(batch, LogprobHead(self.temperature, reference=self.reference))
        batch["old_logprobs"] = outputs["logprobs"]
        if self.reference is not None:
            batch["full_kl"] = outputs["full_kl"]
        return batch

    def update(self, batch: TensorDict) -> Metrics:
        """All epochs and minibatches; metrics `actor/*`, the same on every rank.

        Raises:
            NumericsError: three optimizer steps in a row were not finite.
        """
        reference = self.reference if self.objective.algorithm.kl_in_loss else None
        head = LogprobHead(self.temperature, with_entropy=True, reference=reference)
        update = Update("actor", self.objective, head, self._loss, self.epochs)
        return update.run(self.model, batch)

    def _loss(self, outputs, microbatch, denominator):
        entropies = outputs["entropy"]
        if not self.objective.algorithm.entropy_coefficient:
            # Only reported: its gradient, zero times something, would cost a pass over the logits.
            entropies = entropies.detach()
        outputs["entropy"] = entropies
        return self.objective.loss(microbatch, outputs, denominator)
