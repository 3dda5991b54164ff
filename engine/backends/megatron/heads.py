"""What is computed from the last stage's hidden states, at response positions only.

Slot r of a response holds the token at `prompt_length + r`; what predicts it, and the state it is chosen in, is the
hidden state one position before. A score of the whole sequence is read where its last token stands.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from engine.backends.megatron.full_kl import NextTokens, full_kl
from engine.backends.megatron.logprobs import token_logprobs
from engine.backends.megatron.model import CausalLM
from engine.batch import response_mask, total_lengths
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region

Outputs = dict[str, Tensor]
"""Named [b, R] or [b, R, n] tensors; 0 in slots beyond a response's end."""
OutputFn = Callable[[CausalLM, Tensor, TensorDict], Outputs]
"""(model, hidden [T / sp, s, hidden], the microbatch's rows) -> outputs, on the last stage."""


class FrozenPolicy(NamedTuple):
    """A policy to compare with, whose states the batch has as `ref_states` [b, R, hidden]."""

    network: CausalLM
    temperature: float


@dataclass(frozen=True)
class LogprobHead:
    """`logprobs` of the response tokens, and `entropy` of the distributions they were drawn from."""

    temperature: float = 1.0
    """Of the sampler: logits are divided by it."""
    with_entropy: bool = False
    with_greedy: bool = False
    """Also `greedy`: 1 where the token is the likeliest one."""
    reference: FrozenPolicy | None = None
    """Also `full_kl` to it: between whole distributions, in nats."""

    def __call__(self, model: CausalLM, hidden: Tensor, batch: TensorDict) -> Outputs:
        """Apply to one microbatch."""
        rows, slots = response_mask(batch).nonzero(as_tuple=True)
        positions = batch["prompt_lengths"][rows] + slots
        states = _states(model, hidden, batch, (rows, positions - 1))
        targets = batch["input_ids"][rows, positions]
        # Each tp rank's gradient is the share of its part of the vocabulary; this sums them.
        states = copy_to_tensor_model_parallel_region(states, group=model.tp_group)
        found = token_logprobs(states, model.vocab_shard(), targets, self.temperature, self.with_entropy)
        outputs = {"logprobs": _into_slots(found.logprobs, rows, slots, batch)}
        if found.entropies is not None:
            outputs["entropy"] = _into_slots(found.entropies, rows, slots, batch)
        if self.with_greedy:
            outputs["greedy"] = _into_slots((found.logprobs >= found.highest).float(), rows, slots, batch)
        if self.reference is not None:
            network, temperature = self.reference
            kl = full_kl(NextTokens(states, model.vocab_shard(), self.temperature),
                         NextTokens(batch["ref_states"][rows, slots], network.vocab_shard(), temperature))
            outputs["full_kl"] = _into_slots(kl, rows, slots, batch)
        return outputs


def state_head(model: CausalLM, hidden: Tensor, batch: TensorDict) -> Outputs:
    """`states` [b, R, hidden] that the response tokens are chosen in."""
    rows, slots = response_mask(batch).nonzero(as_tuple=True)
    return {"states": _into_slots(_states(model, hidden, batch, (rows, batch["prompt_lengths"][rows] + slots - 1)),
                                  rows, slots, batch)}


def value_head(model: CausalLM, hidden: Tensor, batch: TensorDict) -> Outputs:
    """`values` of the states the response tokens are chosen in."""
    rows, slots = response_mask(batch).nonzero(as_tuple=True)
    states = _states(model, hidden, batch, (rows, batch["prompt_lengths"][rows] + slots - 1))
    return {"values": _into_slots(model.value_head(states).squeeze(1).float(), rows, slots, batch)}


def score_head(model: CausalLM, hidden: Tensor, batch: TensorDict) -> Outputs:
    """`scores` of whole sequences by a reward model, in the slot of each response's last token."""
    rows = torch.arange(len(batch), device=hidden.device)
    states = _states(model, hidden, batch, (rows, total_lengths(batch) - 1))
    scores = model.value_head(states).squeeze(1).float()
    return {"scores": _into_slots(scores, rows, batch["response_lengths"] - 1, batch)}


def _states(model: CausalLM, hidden: Tensor, batch: TensorDict, at: tuple[Tensor, Tensor]) -> Tensor:
    """[N, hidden] states at N (row, position in its own prompt and response)."""
    rows, positions = at
    if model.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=False, group=model.tp_group)
    # Responses to one prompt may stand one after the other in its sequence.
    beyond = positions - batch["prompt_lengths"][rows]
    places = torch.where(beyond < 0, positions, batch["response_starts"][rows] + beyond)
    return hidden[places, batch["sequence_ids"][rows]]


def _into_slots(values: Tensor, rows: Tensor, slots: Tensor, batch: TensorDict) -> Tensor:
    shape = (*batch["rollout_logprobs"].shape, *values.shape[1:])
    return torch.zeros(shape, dtype=values.dtype, device=values.device).index_put((rows, slots), values)
