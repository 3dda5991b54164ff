"""What the network reads: responses to one prompt follow it in one sequence, so that the prompt is computed once.

The sequence is a tree: every response sees the prompt and itself, and stands where it would stand alone. Outputs and
gradients are those of separate rows (Prefix Grouper, arXiv:2506.05433, has the same idea as two attention calls).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from engine.batch import pack, total_lengths, trim


class Tree(NamedTuple):
    """How the tokens of a microbatch attend, where it is not simply to all before them."""

    positions: Tensor
    """[s, T] int64: each token's place in its own prompt and response."""
    mask: Tensor
    """[s, 1, T, T] bool: True where the token of the third axis sees that of the fourth."""


@dataclass(frozen=True)
class Microbatch:
    """Some rows of a batch and the s sequences of T tokens that hold them."""

    rows: TensorDict
    """With `sequence_ids` [b] and `response_starts` [b]: where each response lies."""
    input_ids: Tensor
    """[s, T]."""
    tree: Tree | None
    """None: every sequence is one row."""


def divide(batch: TensorDict, token_budget: int) -> list[list[list[int]]]:
    """Rows of each sequence of each microbatch; every row exactly once.

    Responses to the same prompt share a sequence as long as that makes attention no dearer: it grows with the square
    of the sequence, and a mask spares nothing. So long responses to a short prompt stay apart. The two of a preference
    pair always share one, so that no microbatch divides them.

    Args:
        batch: rows.
        token_budget: tokens of one microbatch, padding included. A longer row is a microbatch of its own.
    """
    sequences = _pairs(batch) if "pair_ids" in batch.keys() else _siblings(batch, token_budget)
    lengths, prompt_lengths = total_lengths(batch), batch["prompt_lengths"]
    tokens = [int(lengths[rows].sum()) - (len(rows) - 1) * int(prompt_lengths[rows[0]]) for rows in sequences]
    return [[sequences[index] for index in part] for part in pack(tokens, token_budget)]


def _pairs(batch: TensorDict) -> list[list[int]]:
    return [[row, row + 1] for row in range(0, len(batch), 2)]


def _siblings(batch: TensorDict, token_budget: int) -> list[list[int]]:
    """Rows that share a sequence because they have one prompt."""
    lengths, prompt_lengths = total_lengths(batch).tolist(), batch["prompt_lengths"].tolist()
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for row, (ids, prompt_length) in enumerate(zip(batch["input_ids"].tolist(), prompt_lengths, strict=True)):
        by_prompt.setdefault(tuple(ids[:prompt_length]), []).append(row)
    sequences: list[list[int]] = []
    for prompt, rows in by_prompt.items():
        tokens = alone = token_budget + 1  # So that the first row starts a sequence.
        for row in sorted(rows, key=lambda row: (-lengths[row], row)):
            tokens += lengths[row] - len(prompt)
            alone += lengths[row] ** 2
            if tokens <= token_budget and tokens**2 <= alone:
                sequences[-1].append(row)
            else:
                sequences.append([row])
                tokens, alone = lengths[row], lengths[row] ** 2
    return sequences


def microbatch(batch: TensorDict, sequences: list[list[int]], multiple: int, device: torch.device) -> Microbatch:
    """Lay rows out as sequences.

    Args:
        batch: rows.
        sequences: rows of each sequence, which have one prompt.
        multiple: of tokens; sequence parallelism divides them over tp ranks.
        device: where the network is.
    """
    rows = trim(batch[[row for sequence in sequences for row in sequence]])
    prompts, responses = rows["prompt_lengths"].tolist(), rows["response_lengths"].tolist()
    starts: list[int] = []
    ends: list[int] = []
    for sequence in sequences:
        first = len(starts)
        end = prompts[first]
        for row in range(first, first + len(sequence)):
            starts.append(end)
            end += responses[row]
        ends.append(end)
    width = -(-max(ends) // multiple) * multiple
    owners = [index for index, sequence in enumerate(sequences) for _ in sequence]
    input_ids = torch.zeros(len(sequences), width, dtype=torch.int64)
    positions = torch.arange(width).repeat(len(sequences), 1)
    # Prompt 0, responses 1, 2, ...; what follows them is padding, whose outputs nobody reads.
    segments = torch.zeros(len(sequences), width, dtype=torch.int64)
    for row, (sequence, start) in enumerate(zip(owners, starts, strict=True)):
        prompt, end = prompts[row], start + responses[row]
        ids = rows["input_ids"][row]
        input_ids[sequence, :prompt] = ids[:prompt]
        input_ids[sequence, start:end] = ids[prompt : prompt + responses[row]]
        positions[sequence, start:end] = torch.arange(prompt, prompt + responses[row])
        segments[sequence, start:] = row + 1
    rows["sequence_ids"], rows["response_starts"] = torch.tensor(owners), torch.tensor(starts)
    tree = None
    if len(sequences) < len(rows):
        seen = (segments[:, None, :] == 0) | (segments[:, None, :] == segments[:, :, None])
        tree = Tree(positions.to(device), seen.tril()[:, None].to(device))
    return Microbatch(rows.to(device), input_ids.to(device), tree)
