"""What is computed from the last stage's hidden states, at response positions only.

What predicts a response token, and the state it is chosen in, is the hidden state of the token before it: of the
prompt's last token for slot 0.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from engine.backends.megatron.logprobs import token_logprobs
from engine.backends.megatron.model import CausalLM
from engine.batch import response_mask
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region

Outputs = dict[str, Tensor]
"""Named [b, R] float32 tensors; 0 in slots beyond a response's end."""
OutputFn = Callable[[CausalLM, Tensor, TensorDict], Outputs]
"""(model, hidden [T / sp, s, hidden], the microbatch's rows) -> outputs, on the last stage."""


@dataclass(frozen=True)
class LogprobHead:
    """`logprobs` of the response tokens, and `entropy` of the distributions they were drawn from."""

    temperature: float = 1.0
    """Of the sampler: logits are divided by it."""
    with_entropy: bool = False

    def __call__(self, model: CausalLM, hidden: Tensor, batch: TensorDict) -> Outputs:
        """Apply to one microbatch."""
        rows, slots, states = _states(model, hidden, batch)
        targets = batch["input_ids"][rows, batch["prompt_lengths"][rows] + slots]
        # Each tp rank's gradient is the share of its part of the vocabulary; this sums them.
        states = copy_to_tensor_model_parallel_region(states, group=model.tp_group)
        logprobs, entropy = token_logprobs(states, model.vocab_shard(), targets, self.temperature, self.with_entropy)
        outputs = {"logprobs": _into_slots(logprobs, rows, slots, batch)}
        if entropy is not None:
            outputs["entropy"] = _into_slots(entropy, rows, slots, batch)
        return outputs


def value_head(model: CausalLM, hidden: Tensor, batch: TensorDict) -> Outputs:
    """`values` of the states the response tokens are chosen in."""
    rows, slots, states = _states(model, hidden, batch)
    return {"values": _into_slots(model.value_head(states).squeeze(1).float(), rows, slots, batch)}


def _states(model: CausalLM, hidden: Tensor, batch: TensorDict) -> tuple[Tensor, Tensor, Tensor]:
    """Row and slot of each of the N response tokens, and [N, hidden] what each is predicted from."""
    rows, slots = response_mask(batch).nonzero(as_tuple=True)
    if model.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=False, group=model.tp_group)
    before = torch.where(slots == 0, batch["prompt_lengths"][rows], batch["response_starts"][rows] + slots) - 1
    return rows, slots, hidden[before, batch["sequence_ids"][rows]]


def _into_slots(values: Tensor, rows: Tensor, slots: Tensor, batch: TensorDict) -> Tensor:
    shape = batch["rollout_logprobs"].shape
    return torch.zeros(shape, dtype=values.dtype, device=values.device).index_put((rows, slots), values)
