"""Steps that dataflows share: each reads some fields of the batch and adds others."""

import torch
from tensordict import TensorDict
from torch import Tensor

from engine.algorithms.advantages import overlong_penalty, token_rewards
from engine.algorithms.kl import adapt_coefficient, estimate_kl, penalise_rewards
from engine.algorithms.masking import moment_sums, nonfinite_rows, whiten
from engine.algorithms.mismatch import (
    accepted_rows,
    importance_ratio,
    masked_weights,
    mismatch_metrics,
    mismatch_sums,
    truncated_weights,
)
from engine.batch import response_mask
from engine.dataflows.roles import Comm, Metrics, Roles
from engine.dataflows.state import AlgorithmState
from engine.spec.algorithm import PolicyAlgorithm


def policy_logprobs(roles: Roles, batch: TensorDict) -> TensorDict:
    """Add old_logprobs and, when a KL is wanted, ref_logprobs or full_kl; the reference first, which full_kl reads."""
    if roles.reference is not None:
        batch = roles.reference.logprobs(batch)
    return roles.actor.logprobs(batch)


def leave_out(batch: TensorDict, rows: Tensor) -> None:
    """Keep rows ([B] bool) out of the policy loss and its denominators; their scores still count as baselines."""
    kept = response_mask(batch) & ~rows[:, None]
    batch["loss_mask"] = batch["loss_mask"] & kept if "loss_mask" in batch.keys() else kept


def correct_mismatch(comm: Comm, batch: TensorDict, algorithm: PolicyAlgorithm) -> Metrics:
    """Measure the gap between sampler and trainer; add importance_weights or leave rows out when asked for."""
    mask, old, rollout = response_mask(batch), batch["old_logprobs"], batch["rollout_logprobs"]
    sums = comm.sum(mismatch_sums(old, rollout, mask))
    metrics = {f"rollout/{name}": value for name, value in mismatch_metrics(sums).items()}
    correction = algorithm.mismatch
    if correction is None:
        return metrics
    if correction.kind == "rejected":
        rejected = ~accepted_rows(old, rollout, mask, correction.low, correction.high)
        leave_out(batch, rejected)
        counts = comm.sum(torch.stack([rejected.sum(), torch.ones_like(rejected).sum()]))
        return metrics | {"rollout/rejected_share": float(counts[0] / counts[1])}
    ratio = importance_ratio(old, rollout, mask, correction.level)
    if correction.kind == "truncated":
        batch["importance_weights"] = truncated_weights(ratio, correction.cap)
    else:
        batch["importance_weights"] = masked_weights(ratio, correction.low, correction.high)
    changed = comm.sum(torch.stack([((batch["importance_weights"] != ratio) & mask).sum(), mask.sum()]))
    return metrics | {"rollout/importance_clip_share": float(changed[0] / changed[1].clamp(min=1))}


def shaped_scores(batch: TensorDict, algorithm: PolicyAlgorithm, max_response_tokens: int) -> Tensor:
    """[B] scores after the treatment of responses near or at the limit; may leave rows out of the loss.

    Whether a response was cut off is what the sampler says, never read from its tokens.
    """
    overlong = algorithm.overlong
    if overlong is None:
        return batch["scores"]
    if overlong.kind == "shaping":
        slope = overlong_penalty(batch["response_lengths"], max_response_tokens, overlong.buffer_tokens)
        return batch["scores"] + overlong.penalty * slope
    if overlong.kind == "penalty":
        return batch["scores"] - overlong.penalty * batch["truncated"]
    leave_out(batch, batch["truncated"])
    return batch["scores"]


def add_token_rewards(comm: Comm, batch: TensorDict, scores: Tensor, algorithm: PolicyAlgorithm,
                      state: AlgorithmState) -> Metrics:
    """Add token_rewards: `scores` on the last tokens, minus the KL penalty when it belongs to the reward.

    An adaptive coefficient moves here, after its use. The KL that is logged is the estimate that is penalised.
    """
    mask = response_mask(batch)
    batch["token_rewards"] = token_rewards(scores, mask)
    if not algorithm.needs_reference:
        return {}
    kl, coefficient = algorithm.kl, state.kl_coefficient
    estimates = batch["full_kl"] if algorithm.needs_full_kl else estimate_kl(
        batch["old_logprobs"], batch["ref_logprobs"], mask, kl.estimator)
    if kl.kind == "adaptive" or kl.place == "reward":
        batch["token_rewards"] = penalise_rewards(batch["token_rewards"], estimates, coefficient)
    total, tokens, rows = comm.sum(torch.stack(
        [estimates.double().sum(), mask.sum().double(), torch.ones_like(scores).sum().double()])).tolist()
    if kl.kind == "adaptive":
        state.kl_coefficient = adapt_coefficient(coefficient, total / rows, kl.target, int(rows), kl.horizon)
    return {"actor/kl_to_reference": total / max(tokens, 1), "actor/kl_coefficient": coefficient}


def whitened(comm: Comm, values: Tensor, mask: Tensor) -> Tensor:
    """[B, R] with mean 0 and variance 1 over the tokens of all ranks."""
    return whiten(values, mask, comm.sum(moment_sums(values, mask)))


def gather_by_sample(comm: Comm, ids: Tensor, *columns: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
    """Rows of all ranks in the order of their ids, so that no layout changes the order of a sum.

    Args: ids: [b] int64, no two rows of the job equal; columns: [b] each.
    Returns: (ids [N] ascending, the columns [N] in that order, places [b] of this rank's rows in them).
    """
    everyone = comm.gather(ids)
    order = torch.argsort(everyone)
    everyone = everyone[order]
    return everyone, [comm.gather(column)[order] for column in columns], torch.searchsorted(everyone, ids)


_SOURCES = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "full_kl", "values", "cost_values")
_DERIVED = ("token_rewards", "advantages", "returns", "cost_returns")


def count_nonfinite(comm: Comm, batch: TensorDict) -> int:
    """Rows of all ranks with NaN or infinity in what the update reads; marks this rank's in `nonfinite` [B] bool.

    What the roles returned is looked at first: one bad score spoils the derived fields of other rows as well.
    """
    mask = response_mask(batch)
    bad = ~batch["scores"].isfinite()
    if "costs" in batch.keys():
        bad = bad | ~batch["costs"].isfinite()
    for names in (_SOURCES, _DERIVED):
        for name in set(names) & set(batch.keys()):
            bad = bad | nonfinite_rows(batch[name], mask)
        count = int(comm.sum(bad.sum()))
        if count:
            break
    batch["nonfinite"] = bad
    return count


def update(roles: Roles, batch: TensorDict, state: AlgorithmState) -> Metrics:
    """Critic, then actor; neither when the batch holds NaN or infinity, which `alarms/nan` counts in rows."""
    state.iterations += 1
    bad = count_nonfinite(roles.comm, batch)
    if bad:
        return {"alarms/nan": float(bad)}
    metrics = {"alarms/nan": 0.0}
    if roles.critic is not None:
        metrics |= roles.critic.update(batch)
    return metrics | roles.actor.update(batch)

