"""The reward role: scores responses by text and by reward models, and tells all ranks of the replica."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from engine.prompts import Prompt
from engine.rewards.outcome import Outcome
from engine.rewards.pool import Scorable, Scores
from engine.workers.scorers import Scorers

if TYPE_CHECKING:
    from engine.backends.megatron.parallel import World

_RATES = {"error_rate": Outcome.ERROR, "timeout_rate": Outcome.TIMEOUT, "format_error_rate": Outcome.FORMAT_ERROR}


class Detokeniser(Protocol):
    """What of a Hugging Face tokenizer is used here."""

    def batch_decode(self, sequences: Sequence[Sequence[int]], **settings: bool) -> list[str]:
        """Texts of token ids."""


def response_texts(tokenizer: Detokeniser, responses: Sequence[Sequence[int]], truncated: Sequence[bool]) -> list[str]:
    """What a person or a verifier reads of sampled tokens.

    The end token goes: it is the last one of a response that was not cut off. Special tokens anywhere else stay, so
    that a response cannot hide them from a strict pattern.

    Args:
        responses: [N] sampled ids of each.
        truncated: [N] stopped by the length limit, not by an end token.
    """
    kept = [ids if cut else ids[:-1] for ids, cut in zip(responses, truncated, strict=True)]
    return tokenizer.batch_decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class RewardWorker:
    """Scores on one rank of each data-parallel replica; the other ranks of the replica receive the scores."""

    def __init__(self, scorers: Scorers, model_dir: str | Path, world: "World", max_response_tokens: int):
        """Args: scorers: with a pool on the lead rank of each replica, if it needs one; model_dir: of the tokenizer."""
        assert scorers.pool is None or world.is_lead, f"rank {world.rank}: only lead ranks have a scoring pool"
        self._scorers, self._world, self._max_response_tokens = scorers, world, max_response_tokens
        self._names = scorers.names
        self._tokenizer = _load_tokenizer(model_dir) if scorers.pool else None
        self.messages: list[str] = []
        """The first errors of the last call, one line each; on lead ranks."""
        # Rows, sum of total scores, of their squares; then for each reward the sum of its scores and three counts.
        self._sums = torch.zeros(3 + 4 * len(self._names), dtype=torch.float64)

    def score(self, batch: TensorDict, prompts: Sequence[Prompt], samples_per_prompt: int) -> TensorDict:
        """Add `scores` [B] float32 to a batch.

        Args:
            batch: this replica's rows, the same on all of its ranks.
            prompts: [P] those the sample ids count in.
            samples_per_prompt: G; row p * G + g belongs to prompt p.
        Raises:
            FaultError: the scoring processes cannot be started.
        """
        rows = len(batch["sample_ids"])
        message = torch.zeros(rows + len(self._sums), dtype=torch.float64)
        of_models = self._scorers.model_scores(batch)
        if self._world.is_lead:
            items = self._scorables(batch, prompts, samples_per_prompt) if self._scorers.pool else []
            scores = self._scorers.score(items, of_models)
            self.messages = scores.messages
            message = torch.cat([torch.tensor(scores.total, dtype=torch.float64), self._summarise(scores)])
        message = self._broadcast(message.to(batch["input_ids"].device))
        self._sums += message[rows:].cpu()
        batch["scores"] = message[:rows].float()
        return batch

    def take_metrics(self, prefix: str = "reward") -> dict[str, float]:
        """Of all scoring since the last call, over all replicas; every rank must call it, all get the same.

        `PREFIX/mean`, `PREFIX/std`, and for each reward `PREFIX/NAME/` `mean`, `error_rate`, `timeout_rate`,
        `format_error_rate`; `PREFIX/errors` counts samples times rewards that raised or ran out of time.
        """
        sums = self._sums.to(self._world.device)
        self._sums = torch.zeros_like(self._sums)
        if self._world.dp_size > 1:
            dist.all_reduce(sums, group=self._world.groups.dp)
        rows, total, squares, *columns = sums.tolist()
        if not rows:
            return {}
        mean = total / rows
        deviation = max(0.0, squares / rows - mean * mean) ** 0.5
        metrics = {f"{prefix}/mean": mean, f"{prefix}/std": deviation, f"{prefix}/errors": 0.0}
        for index, name in enumerate(self._names):
            score, *counts = columns[4 * index : 4 * index + 4]
            metrics[f"{prefix}/{name}/mean"] = score / rows
            metrics |= {f"{prefix}/{name}/{rate}": count / rows for rate, count in zip(_RATES, counts, strict=True)}
            metrics[f"{prefix}/errors"] += counts[0] + counts[1]
        return metrics

    def _scorables(self, batch: TensorDict, prompts: Sequence[Prompt], samples_per_prompt: int) -> list[Scorable]:
        ids, truncated = batch["input_ids"].tolist(), batch["truncated"].tolist()
        starts, lengths = batch["prompt_lengths"].tolist(), batch["response_lengths"].tolist()
        owners = [prompts[sample_id // samples_per_prompt] for sample_id in batch["sample_ids"].tolist()]
        for row, prompt in enumerate(owners):
            # A score for another prompt's answer would be silent: the tokens say whose row it is.
            assert tuple(ids[row][: starts[row]]) == prompt.token_ids, (
                f"row {row} does not start with the tokens of prompt {prompt.id}: scored with other prompts than "
                f"it was generated from, or samples_per_prompt is not {samples_per_prompt}")
        responses = [row[start : start + length] for row, start, length in zip(ids, starts, lengths, strict=True)]
        texts = response_texts(self._tokenizer, responses, truncated)
        return [Scorable(text, prompt, length, self._max_response_tokens, cut)
                for text, prompt, length, cut in zip(texts, owners, lengths, truncated, strict=True)]

    def _summarise(self, scores: Scores) -> Tensor:
        sums = [len(scores.total), sum(scores.total), sum(score * score for score in scores.total)]
        for name in self._names:
            sums.append(sum(scores.by_name[name]))
            sums += [scores.outcomes[name].count(outcome) for outcome in _RATES.values()]
        return torch.tensor(sums, dtype=torch.float64)

    def _broadcast(self, message: Tensor) -> Tensor:
        group = self._world.groups.model_parallel
        if dist.get_world_size(group) > 1:
            dist.broadcast(message, src=min(dist.get_process_group_ranks(group)), group=group)
        return message


def _load_tokenizer(model_dir: str | Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
