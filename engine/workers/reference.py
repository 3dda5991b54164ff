"""The reference: the frozen policy that the trained one is kept close to."""

from dataclasses import dataclass

from tensordict import TensorDict

from engine.backends.megatron.heads import LogprobHead
from engine.backends.megatron.trainer import Model


@dataclass
class Reference:
    """Logprobs of a policy that never changes: no gradients, no optimizer."""

    model: Model
    temperature: float
    """Of the rollout, as for the actor: a KL compares distributions at one temperature."""

    def logprobs(self, batch: TensorDict) -> TensorDict:
        """The batch with `ref_logprobs` [B, R]."""
        batch["ref_logprobs"] = self.model.forward(batch, LogprobHead(self.temperature))["logprobs"]
        return batch
