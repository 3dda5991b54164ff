"""The batch: what every role reads and extends, one row a sampled sequence.

Shape letters, used everywhere: P prompts, G responses per prompt, B = P * G sequences, T tokens of prompt and response,
R response tokens, V vocabulary. A batch is a TensorDict of batch size [B] with

    input_ids         [B, T] int64   prompt then response, padded on the right with 0
    prompt_lengths    [B]    int64   tokens of the prompt, at least 1
    response_lengths  [B]    int64   sampled tokens, at least 1
    sample_ids        [B]    int64   p * G + g: prompt index in the iteration times G, plus the response's index
    truncated         [B]    bool    stopped by the length limit, not by an end token
    rollout_logprobs  [B, R] float32 what the sampler says of each sampled token
    policy_versions   [B]    int64   the weights it was sampled from
    minibatch_ids     [B]    int64   the optimizer step of an epoch that uses the row (see `shard`)

    pair_ids          [B]    int64   preference pairs only: rows 2n (chosen) and 2n + 1 (rejected) are the n-th pair

and, as roles and algorithms add them, `old_logprobs`, `ref_logprobs`, `values`, `token_rewards`, `advantages`,
`returns`, `full_kl`, all [B, R] float32 with slot r for the r-th response token, `ref_states` [B, R, hidden] (the
reference's, for the full KL), and `scores` [B] float32.

Masks come from lengths, never from token values: the padding token of many models is also their end token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """One sampled response as the rollout returns it."""

    sample_id: int
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    logprobs: Sequence[float]
    truncated: bool


def make_batch(samples: Sequence[Sample], policy_version: int) -> TensorDict:
    """Lay samples out as a batch, in their order.

    Raises:
        ValueError: a prompt or a response is empty, or logprobs and tokens differ in number.
    """
    for s in samples:
        if not s.prompt_ids or not s.response_ids or len(s.logprobs) != len(s.response_ids):
            raise ValueError(
                f"sample {s.sample_id}: {len(s.prompt_ids)} prompt tokens, {len(s.response_ids)} response tokens, "
                f"{len(s.logprobs)} logprobs; the first two must be at least 1, the last two equal")
    rows = len(samples)
    width = max((len(s.prompt_ids) + len(s.response_ids) for s in samples), default=1)
    depth = max((len(s.response_ids) for s in samples), default=1)
    input_ids = torch.zeros(rows, width, dtype=torch.int64)
    logprobs = torch.zeros(rows, depth)
    for row, s in enumerate(samples):
        tokens = [*s.prompt_ids, *s.response_ids]
        input_ids[row, : len(tokens)] = torch.tensor(tokens)
        logprobs[row, : len(s.logprobs)] = torch.tensor(s.logprobs)
    return TensorDict(
        {
            "input_ids": input_ids,
            "prompt_lengths": torch.tensor([len(s.prompt_ids) for s in samples], dtype=torch.int64),
            "response_lengths": torch.tensor([len(s.response_ids) for s in samples], dtype=torch.int64),
            "sample_ids": torch.tensor([s.sample_id for s in samples], dtype=torch.int64),
            "truncated": torch.tensor([s.truncated for s in samples], dtype=torch.bool),
            "rollout_logprobs": logprobs,
            "policy_versions": torch.full((rows,), policy_version, dtype=torch.int64),
            "minibatch_ids": torch.zeros(rows, dtype=torch.int64),
        },
        batch_size=[rows],
    )


def response_mask(batch: TensorDict) -> Tensor:
    """[B, R] bool: True where the slot holds a sampled token."""
    depth = batch["rollout_logprobs"].shape[1]
    return torch.arange(depth, device=batch.device) < batch["response_lengths"][:, None]


def total_lengths(batch: TensorDict) -> Tensor:
    """[B] int64: tokens of prompt and response."""
    return batch["prompt_lengths"] + batch["response_lengths"]


def trim(batch: TensorDict) -> TensorDict:
    """The same rows without columns that are padding in every one of them."""
    width, depth = int(total_lengths(batch).max()), int(batch["response_lengths"].max())
    old_depth = batch["rollout_logprobs"].shape[1]
    return TensorDict(
        {name: _trim_field(name, value, width, depth, old_depth) for name, value in batch.items()},
        batch_size=batch.batch_size,
    )


def _trim_field(name: str, value: Tensor, width: int, depth: int, old_depth: int) -> Tensor:
    if name == "input_ids":
        return value[:, :width]
    return value[:, :depth] if value.ndim >= 2 and value.shape[1] == old_depth else value


def concat(batches: Sequence[TensorDict]) -> TensorDict:
    """Join batches row after row, padding the narrower ones.

    Raises:
        ValueError: they do not have the same fields.
    """
    names = set(batches[0].keys())
    for other in batches[1:]:
        if set(other.keys()) != names:
            raise ValueError(f"batches with different fields: {sorted(names ^ set(other.keys()))}")
    fields = {}
    for name in names:
        values = [batch[name] for batch in batches]
        if values[0].ndim == 2:
            width = max(v.shape[1] for v in values)
            values = [torch.nn.functional.pad(v, (0, width - v.shape[1])) for v in values]
        fields[name] = torch.cat(values)
    return TensorDict(fields, batch_size=[len(fields["sample_ids"])])


def pack(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Divide rows into microbatches of similar lengths: rows x longest row stays within the budget.

    Args:
        lengths: tokens of each row.
        token_budget: tokens of one microbatch, padding included. A longer row is a microbatch of its own.
    Returns:
        Row indices of each microbatch, longest rows first; every row exactly once.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    microbatches: list[list[int]] = []
    for row in order:
        # Rows come longest first, so a microbatch is as wide as its first row.
        if microbatches and (len(microbatches[-1]) + 1) * lengths[microbatches[-1][0]] <= token_budget:
            microbatches[-1].append(row)
        else:
            microbatches.append([row])
    return microbatches


def balance(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Divide rows into parts of equal row counts and nearly equal token counts.

    Rows are dealt in a snake (0 1 2 2 1 0 ...) from the longest down: the result depends on lengths alone.

    Raises:
        ValueError: the rows do not fill equal parts.
    """
    if len(lengths) % parts:
        raise ValueError(f"{len(lengths)} rows do not fill {parts} equal parts")
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    shares: list[list[int]] = [[] for _ in range(parts)]
    for place, row in enumerate(order):
        turn, offset = divmod(place, parts)
        shares[offset if turn % 2 == 0 else parts - 1 - offset].append(row)
    return [sorted(share) for share in shares]


def shard(batch: TensorDict, minibatches: int, parts: int, part: int, seed: int) -> TensorDict:
    """The rows of one data-parallel rank, marked with the minibatch that each belongs to.

    Minibatches are drawn from the whole batch before it is divided over ranks, so that an optimizer step sees the same
    samples under every layout.

    Args:
        batch: all B rows, the same on every rank.
        minibatches: optimizer steps of an epoch; B must fill minibatches x parts.
        parts, part: data-parallel ranks, and which of them asks.
        seed: draws the minibatches.
    """
    batch = batch[torch.argsort(batch["sample_ids"])]
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    lengths = total_lengths(batch)
    rows, ids = [], []
    for index, members in enumerate(order.chunk(minibatches)):
        members = members.sort().values
        mine = members[balance(lengths[members].tolist(), parts)[part]]
        rows.append(mine)
        ids.append(torch.full_like(mine, index))
    result = batch[torch.cat(rows)]
    result["minibatch_ids"] = torch.cat(ids)
    return trim(result)
