"""What the actor's and the critic's workers minimise: the spec's choice of losses, over the fields of a batch.

A worker counts the denominator of a minibatch first, adds it over its data-parallel ranks, and then calls `loss` on
each microbatch. The losses and gradients of all microbatches on all ranks simply add up. So do the sums that come with
them, which `metrics` turns into the numbers of docs/metrics.md.
"""

from dataclasses import dataclass

from tensordict import TensorDict
from torch import Tensor

from engine.algorithms.kl import kl_loss
from engine.algorithms.losses import (
    Sampled,
    Sums,
    cispo_loss,
    entropy_bonus,
    gspo_loss,
    loss_denominator,
    ppo_loss,
    reinforce_loss,
    token_weights,
    value_loss,
)
from engine.algorithms.masking import masked_sum, zero_masked
from engine.batch import response_mask
from engine.spec.algorithm import ActorCritic, PolicyAlgorithm


def trained_mask(batch: TensorDict) -> Tensor:
    """[B, R] bool: sampled tokens, without those that the dataflow left out (field `loss_mask`)."""
    mask = response_mask(batch)
    return mask & batch["loss_mask"] if "loss_mask" in batch.keys() else mask


@dataclass(frozen=True)
class ActorObjective:
    """Policy loss, minus the entropy bonus, plus the KL loss."""

    algorithm: PolicyAlgorithm
    max_response_tokens: int
    """The rollout's limit; what aggregation `constant` divides by."""

    def denominator(self, batch: TensorDict) -> Tensor:
        """Scalar float64: this part's share of the minibatch's denominator."""
        return loss_denominator(trained_mask(batch), self.algorithm.aggregation, self.max_response_tokens)

    def loss(
        self, batch: TensorDict, outputs: dict[str, Tensor], denominator: Tensor | float
    ) -> tuple[Tensor, Sums]:
        """The loss of one microbatch.

        Args:
            batch: rows with old_logprobs and advantages; ref_logprobs when an estimated KL is a loss;
                importance_weights and loss_mask when the dataflow set them.
            outputs: of the policy being trained, with gradient, each [B, R]: `logprobs`; `entropy` in nats, needed when
                entropy_coefficient is above 0, else only reported; `full_kl`, needed when it is a loss.
            denominator: of the whole minibatch: `denominator` added over its microbatches and ranks.
        Returns:
            (scalar with gradient, sums to add up for `metrics`).
        """
        algorithm, mask = self.algorithm, trained_mask(batch)
        logprobs, entropies = outputs["logprobs"], outputs.get("entropy")
        plain = token_weights(mask, algorithm.aggregation, denominator)
        weights = plain * batch["importance_weights"] if "importance_weights" in batch.keys() else plain
        loss, sums = self._policy_loss(logprobs, Sampled(batch["old_logprobs"], batch["advantages"], mask, weights))
        if entropies is None and algorithm.entropy_coefficient > 0:
            raise ValueError(f"entropy_coefficient {algorithm.entropy_coefficient} needs the entropies of the tokens")
        if entropies is not None:
            bonus, entropy_sums = entropy_bonus(entropies, mask, plain)
            loss, sums = loss - algorithm.entropy_coefficient * bonus, sums | entropy_sums
        if algorithm.kl_in_loss:
            terms = zero_masked(outputs["full_kl"], mask) if algorithm.needs_full_kl else kl_loss(
                logprobs, batch["ref_logprobs"], batch["old_logprobs"], mask, algorithm.kl.estimator)
            loss = loss + algorithm.kl.coefficient * (weights * terms).sum()
            sums["kl_loss"] = masked_sum(terms.detach(), mask)
        return loss, sums | {"loss": loss.detach()}

    def _policy_loss(self, logprobs: Tensor, sampled: Sampled) -> tuple[Tensor, Sums]:
        algorithm = self.algorithm
        low, high = algorithm.clip_ratio, algorithm.clip_high
        if algorithm.loss == "clip":
            return ppo_loss(logprobs, sampled, low, high, algorithm.dual_clip)
        if algorithm.loss == "sequence_clip":
            return gspo_loss(logprobs, sampled, low, high)
        if algorithm.loss == "weight_clip":
            return cispo_loss(logprobs, sampled, low, high)
        return reinforce_loss(logprobs, sampled)

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """`actor/*` of one optimizer step, from the sums of all its microbatches and ranks."""
        tokens = max(sums["tokens"], 1)
        metrics = {
            "actor/loss": sums["loss"],
            "actor/clip_share": sums["clipped_tokens"] / tokens,
            "actor/kl_to_old": sums["kl_to_old"] / tokens,
            "actor/ratio": sums["ratio"] / tokens,
        }
        for name in ("entropy", "kl_loss"):
            if name in sums:
                metrics[f"actor/{name}"] = sums[name] / tokens
        return metrics


@dataclass(frozen=True)
class CriticObjective:
    """Clipped squared error to the returns, every token of the minibatch weighing the same."""

    algorithm: ActorCritic

    def denominator(self, batch: TensorDict) -> Tensor:
        """Scalar float64: this part's share of the minibatch's denominator."""
        return loss_denominator(response_mask(batch), "token", 1)

    def loss(self, batch: TensorDict, values: Tensor, denominator: Tensor | float) -> tuple[Tensor, Sums]:
        """The loss of one microbatch.

        Args:
            batch: rows with values (before the update) and returns.
            values: [B, R] of the critic being trained, with gradient.
            denominator: of the whole minibatch.
        """
        weights = token_weights(response_mask(batch), "token", denominator)
        loss, sums = value_loss(values, batch["values"], batch["returns"], weights, self.algorithm.value_clip)
        return loss, sums | {"loss": loss.detach()}

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """`critic/*` of one optimizer step, from the sums of all its microbatches and ranks."""
        tokens = max(sums["tokens"], 1)
        error = sums["errors_squared"] / tokens - (sums["errors"] / tokens) ** 2
        spread = sums["returns_squared"] / tokens - (sums["returns"] / tokens) ** 2
        return {
            "critic/loss": sums["loss"],
            "critic/clip_share": sums["clipped_tokens"] / tokens,
            "critic/explained_variance": 1 - error / spread if spread > 1e-12 else 0.0,
        }
