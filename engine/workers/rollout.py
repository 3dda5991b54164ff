"""The rollout role: samples responses on all replicas of the inference engine and gives every rank its rows."""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from engine.backends.vllm.requests import Request, Response
from engine.batch import Sample, make_batch, shard
from engine.errors import FaultError
from engine.layout import GenerationLayout
from engine.prompts import Prompt

Generate = Callable[[Sequence[Request]], list[Response]]


def sample_seed(seed: int, iteration: int, sample_id: int) -> int:
    """The seed of one sample, 0 <= seed < 2**63: the same wherever and beside whatever it is generated."""
    digest = hashlib.blake2b(f"{seed}/{iteration}/{sample_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def deal(num_prompts: int, samples_per_prompt: int, replicas: int) -> list[list[int]]:
    """Which samples each replica generates: equal numbers, whole prompts where possible.

    A prompt whose samples stay together is prefilled once. Neighbouring prompts go to different replicas, because
    sorted data sets have neighbours of similar length.

    Returns:
        [replicas] sample ids (p * G + g) in ascending order; every one of them exactly once.
    """
    whole = num_prompts - num_prompts % replicas
    shares: list[list[int]] = [[] for _ in range(replicas)]
    for sample_id in range(num_prompts * samples_per_prompt):
        prompt = sample_id // samples_per_prompt
        shares[(prompt if prompt < whole else sample_id) % replicas].append(sample_id)
    return shares


class Replicas:
    """The inference replicas of a job, seen from one rank: each generates its share, all ranks get everything."""

    def __init__(self, layout: GenerationLayout):
        """Every rank of the job must build it, in the same order as its other process groups."""
        self.rank, world_size = dist.get_rank(), dist.get_world_size()
        self.count = layout.replicas(world_size)
        self.index = layout.replica(self.rank)
        self._all = dist.new_group(backend="gloo")
        # Ranks at the same place of each replica exchange samples: everything arrives once, from equal copies.
        groups = [dist.new_group([r for r in range(world_size) if layout.place(r) == place], backend="gloo")
                  for place in range(layout.tp)]
        self._peers = groups[layout.place(self.rank)]

    def gather(self, mine: dict[int, Response]) -> dict[int, Response]:
        """Exchange responses between replicas.

        Args:
            mine: by sample id, what this replica generated.
        Returns:
            All responses of all replicas, by sample id, the same on every rank.
        Raises:
            FaultError: ranks of one replica generated different responses.
        """
        header = torch.tensor([[i, len(r.token_ids), r.truncated] for i, r in mine.items()], dtype=torch.int64)
        tokens = torch.tensor([t for r in mine.values() for t in r.token_ids], dtype=torch.int64)
        logprobs = torch.tensor([p for r in mine.values() for p in r.logprobs], dtype=torch.float32)
        headers = self._gather_rows(header.reshape(-1, 3))
        values = zip(self._gather_rows(tokens), self._gather_rows(logprobs), strict=True)
        everything: dict[int, Response] = {}
        for rows, (ids, scores) in zip(headers, values, strict=True):
            lengths = rows[:, 1].tolist()
            for (sample_id, _, truncated), row_ids, row_scores in zip(
                    rows.tolist(), ids.split(lengths), scores.split(lengths), strict=True):
                everything[sample_id] = Response(row_ids.tolist(), row_scores.tolist(), bool(truncated))
        self._check_equal(everything)
        return dict(sorted(everything.items()))

    def _gather_rows(self, mine: Tensor) -> list[Tensor]:
        """Tensors of different first dimension from every peer."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        dist.all_gather(sizes, torch.tensor([len(mine)]), group=self._peers)
        longest = max(int(size) for size in sizes)
        padded = mine.new_zeros((longest, *mine.shape[1:]))
        padded[: len(mine)] = mine
        received = [torch.empty_like(padded) for _ in range(self.count)]
        dist.all_gather(received, padded, group=self._peers)
        return [rows[: int(size)] for rows, size in zip(received, sizes, strict=True)]

    def _check_equal(self, everything: dict[int, Response]) -> None:
        text = repr([(i, r.token_ids, r.truncated) for i, r in sorted(everything.items())])
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)
        digests = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(digests, torch.tensor([digest]), group=self._all)
        others = [rank for rank, other in enumerate(digests) if int(other) != digest]
        if others:
            raise FaultError(f"rollout: rank {self.rank} holds other samples than ranks {others[:8]}; "
                             f"the ranks of a replica must generate the same tokens")


@dataclass(frozen=True)
class RolloutPlan:
    """What stays the same over the iterations of a stage."""

    samples_per_prompt: int
    max_response_tokens: int
    temperature: float
    seed: int
    minibatches: int
    dp: int
    """Data-parallel ranks of training."""
    dp_rank: int
    """Whose rows this rank gets."""


class Rollout:
    """Samples G responses to every prompt of an iteration."""

    def __init__(self, generate: Generate, replicas: Replicas, plan: RolloutPlan):
        """Args: generate: of the inference engine, guarded against stale weights (`HybridEngine.generate`)."""
        self._generate, self.replicas, self.plan = generate, replicas, plan
        self.metrics: dict[str, float] = {}
        """Of the last call: tokens per second, response lengths, share of truncated responses."""

    def generate(self, prompts: Sequence[Prompt], iteration: int, policy_version: int, *,
                 greedy: bool = False) -> TensorDict:
        """Sample and divide: the rows are the same for any number of replicas and any tensor parallelism.

        Args:
            prompts: [P] of this iteration, the same on every rank.
            iteration: with the run's seed it decides every sample's seed.
            policy_version: of the weights being served; written into the batch.
            greedy: one response of highest probability to each prompt, sample ids p, instead of G sampled ones.
        Returns:
            The rows of this rank's data-parallel replica, see `engine.batch.shard`.
        """
        plan, started = self.plan, time.monotonic()
        group_size = 1 if greedy else plan.samples_per_prompt
        share = deal(len(prompts), group_size, self.replicas.count)[self.replicas.index]
        requests = [Request(
            prompt_ids=prompts[sample_id // group_size].token_ids, seed=sample_seed(plan.seed, iteration, sample_id),
            max_tokens=plan.max_response_tokens, temperature=0.0 if greedy else plan.temperature)
            for sample_id in share]
        responses = self.replicas.gather(dict(zip(share, self._generate(requests), strict=True)))
        self.metrics = summarise_lengths(list(responses.values()), time.monotonic() - started)
        batch = make_batch([
            Sample(i, prompts[i // group_size].token_ids, r.token_ids, r.logprobs, r.truncated)
            for i, r in responses.items()], policy_version)
        # Greedy responses are only scored: no optimizer step divides them.
        minibatches = 1 if greedy else plan.minibatches
        return shard(batch, minibatches, plan.dp, plan.dp_rank, sample_seed(plan.seed, iteration, -1))


def summarise_lengths(responses: Sequence[Response], seconds: float) -> dict[str, float]:
    """Metrics of a rollout over all replicas."""
    lengths = [len(response.token_ids) for response in responses]
    return {
        "rollout/tokens_per_s": sum(lengths) / seconds,
        "rollout/response_tokens_mean": sum(lengths) / len(lengths),
        "rollout/response_tokens_max": float(max(lengths)),
        "rollout/truncated_share": sum(response.truncated for response in responses) / len(responses),
    }
