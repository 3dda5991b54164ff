"""The reference: the frozen policy that the trained one is kept close to."""

from dataclasses import dataclass

from tensordict import TensorDict

from engine.backends.megatron.heads import FrozenPolicy, LogprobHead, state_head
from engine.backends.megatron.trainer import Model


@dataclass
class Reference:
    """Logprobs of a policy that never changes: no gradients, no optimizer."""

    model: Model
    temperature: float
    """Of the rollout, as for the actor: a KL compares distributions at one temperature."""
    whole: bool = False
    """For the full KL: states, from which the actor computes whole distributions, instead of logprobs."""

    @property
    def policy(self) -> FrozenPolicy | None:
        """What the actor compares itself with; None where it reads logprobs."""
        return FrozenPolicy(self.model.network, self.temperature) if self.whole else None

    def logprobs(self, batch: TensorDict) -> TensorDict:
        """The batch with `ref_logprobs` [B, R], or with `ref_states` [B, R, hidden] on the ranks that need them."""
        if self.whole:
            for states in self.model.forward(batch, state_head, everywhere=False).values():
                batch["ref_states"] = states
            return batch
        batch["ref_logprobs"] = self.model.forward(batch, LogprobHead(self.temperature))["logprobs"]
        return batch
