"""Roles of one process on a model small enough to be exact: a table of logits for every prompt and slot.

Words are 0 .. 3; word 3 ends the response, which has at most R tokens. Prompts are ints; their id is the prompt token.
"""

import copy
from dataclasses import dataclass, field

import torch

from engine.algorithms.kl import full_kl
from engine.batch import Sample, concat, make_batch, response_mask
from engine.dataflows.objectives import ActorObjective, CriticObjective

WORDS, END, LIMIT, PROMPTS = 4, 3, 3, 8


class Table(torch.nn.Module):
    """[prompt, slot, previous word] -> `width` numbers; previous word WORDS stands for none."""

    def __init__(self, width, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.nn.Parameter(0.1 * torch.randn(PROMPTS, LIMIT, WORDS + 1, width, generator=generator))

    def forward(self, batch):
        """[B, R, width]."""
        depth = batch["rollout_logprobs"].shape[1]
        before = batch["input_ids"].gather(1, (response_positions(batch) - 1))
        before[:, 0] = WORDS
        prompts = batch["input_ids"][:, 0]
        return self.table[prompts[:, None], torch.arange(depth)[None], before]


def response_positions(batch):
    """[B, R]: where in `input_ids` each response token stands, clamped into the row for masked slots."""
    depth = batch["rollout_logprobs"].shape[1]
    return (batch["prompt_lengths"][:, None] + torch.arange(depth)).clamp(max=batch["input_ids"].shape[1] - 1)


def logprobs_of(model, batch):
    """Logprobs of the sampled words and entropies, each [B, R]; NaN in masked slots, which nothing may read.

    Also the full KL where the reference has left its distributions (its states are their logprobs).
    """
    log_p = model(batch).log_softmax(-1)
    words = batch["input_ids"].gather(1, response_positions(batch)).clamp(max=WORDS - 1)
    mask, nan = response_mask(batch), torch.full(words.shape, float("nan"))
    found = {"logprobs": torch.where(mask, log_p.gather(-1, words[..., None])[..., 0], nan),
             "entropy": torch.where(mask, -(log_p.exp() * log_p).sum(-1), nan)}
    if "ref_states" in batch.keys():
        found["full_kl"] = full_kl(log_p, batch["ref_states"], mask)
    return found


@dataclass
class Rollout:
    model: Table
    samples_per_prompt: int
    gap: float = 0.0
    """Noise on the sampler's logprobs, as another kernel would have."""
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))
    calls: list = field(default_factory=list)

    @torch.no_grad()
    def generate(self, prompts, *, greedy=False):
        self.calls.append((list(prompts), greedy))
        count = 1 if greedy else self.samples_per_prompt
        batch = make_batch([self._sample(prompt, p * count + g, greedy)
                            for p, prompt in enumerate(prompts) for g in range(count)], policy_version=0)
        noise = torch.randn(batch["rollout_logprobs"].shape, generator=self.generator)
        batch["rollout_logprobs"] = batch["rollout_logprobs"] + self.gap * noise
        return batch

    def _sample(self, prompt, sample_id, greedy):
        words, logprobs, before = [], [], WORDS
        for slot in range(LIMIT):
            log_p = self.model.table[prompt, slot, before].log_softmax(0)
            before = int(log_p.argmax() if greedy else torch.multinomial(log_p.exp(), 1, generator=self.generator))
            words.append(before)
            logprobs.append(float(log_p[before]))
            if before == END:
                break
        return Sample(sample_id, [prompt], words, logprobs, truncated=before != END)


@dataclass
class Trained:
    """Optimizer steps over shuffled minibatches, each in microbatches of two rows."""

    model: Table
    objective: ActorObjective | CriticObjective
    lr: float = 0.25
    steps: int = 1

    def __post_init__(self):
        self.optimizer = torch.optim.Adam(self.model.parameters(), self.lr)

    def update(self, batch):
        for _ in range(self.steps):
            self.optimizer.zero_grad()
            denominator = self.objective.denominator(batch)
            totals = {}
            for rows in batch.split(2):
                loss, sums = self.loss(rows, denominator)
                loss.backward()
                totals = {name: totals.get(name, 0) + float(value) for name, value in sums.items()}
            self.optimizer.step()
        return self.objective.metrics(totals)


class Actor(Trained):
    @torch.no_grad()
    def logprobs(self, batch):
        found = logprobs_of(self.model, batch)
        batch["old_logprobs"] = found["logprobs"]
        if "full_kl" in found:
            batch["full_kl"] = found["full_kl"]
        return batch

    def loss(self, rows, denominator):
        return self.objective.loss(rows, logprobs_of(self.model, rows), denominator)


@dataclass
class Reference:
    model: Table
    whole: bool = False

    @torch.no_grad()
    def logprobs(self, batch):
        if self.whole:
            batch["ref_states"] = self.model(batch).log_softmax(-1)
        else:
            batch["ref_logprobs"] = logprobs_of(self.model, batch)["logprobs"]
        return batch


class Critic(Trained):
    @torch.no_grad()
    def values(self, batch):
        batch["values"] = self.model(batch)[..., 0]
        return batch

    def loss(self, rows, denominator):
        return self.objective.loss(rows, self.model(rows)[..., 0], denominator)


@dataclass
class Reward:
    """Scores each response by a function of (prompt, list of words)."""

    rule: object

    def score(self, batch):
        scores = [self.rule(int(row["input_ids"][0]), row["input_ids"][1:1 + int(row["response_lengths"])].tolist())
                  for row in batch]
        batch["scores"] = torch.tensor(scores, dtype=torch.float32)
        return batch


class OneRank:
    """The exchange of a job with one data-parallel rank."""

    def gather(self, values):
        return values

    def sum(self, values):
        return values


@dataclass
class TinyRoles:
    rollout: Rollout
    actor: Actor
    reference: Reference | None
    critic: Critic | None
    reward: Reward
    cost: Reward | None = None
    cost_critic: Critic | None = None
    comm: object = field(default_factory=OneRank)
    max_response_tokens: int = LIMIT
    refills: int = 0

    def more_prompts(self):
        self.refills += 1
        return self.rollout.calls[-1][0]

    def redistribute(self, batch):
        return concat([batch])


def make_roles(algorithm, rule, *, cost=None, gap=0.0, steps=1):
    """Roles that start from the same policy every time."""
    policy = Table(WORDS)

    def make_critic(seed):
        return Critic(Table(1, seed), CriticObjective(algorithm), 0.2, steps) if algorithm.needs_critic else None

    return TinyRoles(
        rollout=Rollout(policy, algorithm.samples_per_prompt, gap),
        actor=Actor(policy, ActorObjective(algorithm, LIMIT), steps=steps),
        reference=Reference(copy.deepcopy(policy), algorithm.needs_full_kl) if algorithm.needs_reference else None,
        critic=make_critic(1), reward=Reward(rule),
        cost=cost and Reward(cost), cost_critic=make_critic(2) if cost else None)


@torch.no_grad()
def exact_mean(policy, rule, prompt):
    """The expectation of `rule` over every response to the prompt."""
    def walk(words, probability):
        if words and (words[-1] == END or len(words) == LIMIT):
            return probability * rule(prompt, words)
        before = words[-1] if words else WORDS
        chances = policy.table[prompt, len(words), before].softmax(0)
        return sum(walk([*words, word], probability * float(chances[word])) for word in range(WORDS))

    return walk([], 1.0)


def mean_over(policy, rule, prompts):
    """The mean of `exact_mean` over prompts."""
    return sum(exact_mean(policy, rule, p) for p in prompts) / len(prompts)
