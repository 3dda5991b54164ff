"""The evaluate stage: the same held-out prompts and the same seeds for every model, in one process after the other."""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from engine import store
from engine.backends.vllm.requests import GeneratorConfig, Request, Response
from engine.batch import Sample, make_batch
from engine.errors import DataError, ModelError
from engine.evaluation_cache import CachedEvaluation, EvaluationCache
from engine.job import Job
from engine.layout import ParallelLayout, check_generation_layout, read_model_shape
from engine.model_files import local_model
from engine.prompts import Prompt, PromptSet
from engine.ranks import join_ranks
from engine.rewards.pool import Scorable, Scores, ScoringPool
from engine.spec.evaluate import EvaluatedModel, EvaluateSpec
from engine.spec.evaluation import (
    EVALUATION_FILE,
    SAMPLES_FILE,
    Evaluation,
    ModelEvaluation,
    PromptScores,
    SampleRecord,
)
from engine.spec.job import RunResult
from engine.spec.tracking import clean_metric_name
from engine.statistics import summarise
from engine.tracking import DatasetInput, Tracker
from engine.workers.reward import response_texts
from engine.workers.rollout import Replicas, deal
from engine.workers.scorers import RewardModel, Scorers, load_reward_models, pooled

MICROBATCH_TOKENS = 8192
"""Of one forward of a reward model."""
IGNORED_CONFIG = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
"""Keys of config.json that may differ between models of one architecture."""


def run(job: Job, spec: EvaluateSpec) -> RunResult:
    """Evaluate `spec.models` and write evaluation.json and samples.jsonl to the job directory.

    Raises:
        RefusedError: prompts or models that cannot be used, or models of different architectures.
    """
    started = time.monotonic()
    join_ranks()
    evaluator = Evaluator(job, spec)
    try:
        found = [evaluator.evaluate(model) for model in evaluator.models]
    finally:
        evaluator.close()
    result = RunResult(stage="evaluate")
    if job.rank == 0:
        result = _write(job, spec, [f for f in found if f], evaluator.prompts_hash)
    dist.barrier()
    seconds = time.monotonic() - started
    return result.model_copy(update={
        "gpu_seconds": seconds * spec.world_size, "timings_s": evaluator.timings_s | {"total": seconds}})


@dataclass(frozen=True)
class LocalModel:
    """A model to evaluate, on this machine's disk."""

    name: str
    uri: str
    directory: Path

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Its tokenizer."""
        return AutoTokenizer.from_pretrained(self.directory)

    @cached_property
    def config(self) -> dict[str, Any]:
        """What its architecture is."""
        config = AutoConfig.from_pretrained(self.directory).to_dict()
        return {key: value for key, value in config.items() if key not in IGNORED_CONFIG}


class Evaluator:
    """Generates, scores and summarises, one model after the other. Every rank has one; rank 0 scores and keeps."""

    def __init__(self, job: Job, spec: EvaluateSpec):
        self.job, self.spec = job, spec
        prompts = PromptSet.open(spec.prompts, "eval")
        self.prompts_hash = prompts.sha256
        self.prompts = [prompts[row] for row in range(min(len(prompts), spec.max_prompts or len(prompts)))]
        self.models = [_fetch(model, job) for model in spec.models]
        check_models(self.models, self.prompts, spec)
        self.timings_s: dict[str, float] = {}
        self._cache = EvaluationCache(spec.cache, settings_hash(spec), self.prompts_hash) if job.rank == 0 else None
        self._pool: ScoringPool | None = None
        self._reward_models: dict[str, RewardModel] | None = None
        self._done = 0

    def close(self) -> None:
        """End the scoring processes."""
        if self._pool:
            self._pool.close()

    def evaluate(self, model: LocalModel) -> CachedEvaluation | None:
        """Scores and samples of one model, from the cache if it has them; None on ranks other than 0."""
        self.job.progress("evaluate", self._done, len(self.models))
        started = time.monotonic()
        weights_hash = store.hash_model_dir(model.directory) if self._cache else ""
        found = self._cache.find(weights_hash, model.directory) if self._cache else None
        # Rank 0 alone sees the cache: the others generate when it must.
        missing = [found is None]
        dist.broadcast_object_list(missing, src=0)
        if missing[0]:
            if self._cache and not self._pool and pooled(self.spec.rewards):
                # Before vLLM: its verifiers are imported while the engine starts.
                self._pool = ScoringPool(pooled(self.spec.rewards))
            self._load_reward_models()
            responses = self._generate(model)
            if self._cache:
                found = self._score(model, weights_hash, responses)
                self._cache.keep(found, model.directory)
        self._done += 1
        self.timings_s[f"evaluate/{model.name}"] = time.monotonic() - started
        self.job.event("evaluated", model=model.name, cached=not missing[0],
                       seconds=round(time.monotonic() - started, 2))
        return found and found.renamed(model.name, model.uri)

    def _load_reward_models(self) -> None:
        """On rank 0, which scores; before vLLM, which sizes itself by what is left. Every rank must call it."""
        rewards = self.spec.rewards
        if self._reward_models is not None or len(pooled(rewards)) == len(rewards):
            return
        from engine.backends.megatron.parallel import start_world

        # Each rank for itself: one scores, and none waits for another.
        world = start_world(ParallelLayout(dp=self.spec.world_size), self.spec.seed)
        self._reward_models = {} if self._cache is None else load_reward_models(
            rewards, world, self.models[0].directory, MICROBATCH_TOKENS)

    def _generate(self, model: LocalModel) -> dict[int, Response]:
        """The greedy response of prompt p as p * (1 + k), its k sampled ones after it; the same on every rank."""
        started = time.monotonic()
        generator, replicas = self._engine
        generator.load(model.directory)
        loaded = time.monotonic()
        group_size = 1 + self.spec.samples_per_prompt
        share = deal(len(self.prompts), group_size, replicas.count)[replicas.index]
        requests = [self._request(i // group_size, i % group_size) for i in share]
        responses = replicas.gather(dict(zip(share, generator.generate(requests), strict=True)))
        self.timings_s[f"load/{model.name}"] = loaded - started
        self.timings_s[f"generate/{model.name}"] = time.monotonic() - loaded
        return responses

    @cached_property
    def _engine(self) -> tuple[Any, Replicas]:
        # Importing vLLM takes ten seconds: not when the cache answers.
        from engine.backends.vllm.generator import Generator

        spec, started = self.spec, time.monotonic()
        generator = Generator(self.models[0].directory, spec.layout, GeneratorConfig(
            max_model_len=max(len(p.token_ids) for p in self.prompts) + spec.max_response_tokens,
            kv_cache_bytes=spec.kv_cache_bytes, max_concurrent_sequences=spec.max_concurrent_sequences))
        self.timings_s["start_vllm"] = time.monotonic() - started
        return generator, Replicas(spec.layout)

    def _request(self, prompt: int, sample: int) -> Request:
        return Request(
            prompt_ids=self.prompts[prompt].token_ids, max_tokens=self.spec.max_response_tokens,
            seed=evaluation_seed(self.spec.seed, self.prompts[prompt].id, sample),
            temperature=self.spec.temperature if sample else 0.0)

    def _score(self, model: LocalModel, weights_hash: str, responses: dict[int, Response]) -> CachedEvaluation:
        spec, group_size = self.spec, 1 + self.spec.samples_per_prompt
        answers = [responses[i] for i in range(len(self.prompts) * group_size)]
        texts = response_texts(model.tokenizer, [r.token_ids for r in answers], [r.truncated for r in answers])
        scorers = Scorers(spec.rewards, self._pool, self._reward_models or {})
        of_models = scorers.model_scores(make_batch([
            Sample(i, self.prompts[i // group_size].token_ids, r.token_ids, r.logprobs, r.truncated)
            for i, r in enumerate(answers)], policy_version=0))
        scores = scorers.score([
            Scorable(text, self.prompts[i // group_size], len(r.token_ids), spec.max_response_tokens, r.truncated)
            for i, (text, r) in enumerate(zip(texts, answers, strict=True))], of_models)
        for message in scores.messages:
            self.job.event("scoring_error", model=model.name, message=message)
        prompts = prompt_scores(self.prompts, answers, scores, group_size)
        metrics = summarise(prompts, spec.pass_threshold) | response_metrics(answers, scores, group_size)
        samples = [SampleRecord(
            model=model.name, id=p.id, task=p.task, prompt=p.text, answer=p.answer, response=texts[i],
            greedy=i % group_size == 0, score=scores.total[i], tokens=len(answers[i].token_ids))
            for i, p in ((i, self.prompts[i // group_size]) for i in range(len(answers)))]
        return CachedEvaluation(ModelEvaluation(
            model=model.name, uri=model.uri, weights_hash=weights_hash, prompts_hash=self.prompts_hash,
            settings_hash=settings_hash(spec), prompts=prompts, metrics=metrics), samples)


def evaluation_seed(seed: int, prompt_id: str, sample: int) -> int:
    """The seed of one response, 0 <= seed < 2**63: the same for every model, batch size and number of replicas."""
    digest = hashlib.blake2b(f"{seed}/{prompt_id}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def settings_hash(spec: EvaluateSpec) -> str:
    """sha256 over everything besides weights and prompts that can change a score; layouts and sizes cannot."""
    names = {"max_prompts", "max_response_tokens", "samples_per_prompt", "temperature", "pass_threshold", "seed"}
    settings = spec.model_dump(mode="json", include=names | {"rewards"})
    for reward in settings["rewards"]:
        if reward["kind"] == "reward_model":
            # Its path may hold other weights tomorrow.
            reward["model"] = _hash_weights(reward["model"])
    settings["dtype"] = "bfloat16" if torch.cuda.is_available() else "float32"
    return store.sha256_bytes(json.dumps(settings, sort_keys=True).encode())


@cache
def _hash_weights(model_dir: str) -> str:
    return store.hash_model_dir(model_dir)


def prompt_scores(prompts: Sequence[Prompt], responses: Sequence[Response], scores: Scores,
                  group_size: int) -> list[PromptScores]:
    """[P] what the gates pair candidate and champion by.

    Args:
        responses: [P * group_size] the greedy one of each prompt before its sampled ones; `scores` likewise.
    """
    found = []
    for row, prompt in enumerate(prompts):
        group = slice(row * group_size, (row + 1) * group_size)
        greedy, *sampled = scores.total[group]
        found.append(PromptScores(
            id=prompt.id, task=prompt.task, greedy=greedy, sampled=sampled,
            lengths=[len(r.token_ids) for r in responses[group]], format_errors=sum(scores.format_errors[group])))
    return found


def response_metrics(responses: Sequence[Response], scores: Scores, group_size: int) -> dict[str, float]:
    """Shares over all responses, greedy and sampled, that `engine.statistics.summarise` does not see."""
    count = len(responses)
    greedy = [r for i, r in enumerate(responses) if i % group_size == 0]
    return {
        "truncated_share": sum(r.truncated for r in responses) / count,
        "greedy_truncated_share": sum(r.truncated for r in greedy) / len(greedy),
        "scoring_error_share": sum(scores.errors) / count,
        "scoring_timeout_share": sum(scores.timeouts) / count,
    }


def check_models(models: Sequence[LocalModel], prompts: Sequence[Prompt], spec: EvaluateSpec) -> None:
    """Refuse models that one engine cannot hold one after the other, or that cannot read the prompts.

    Raises:
        ModelError: another architecture or vocabulary than the first model's. DataError: token ids beyond the
        vocabulary. LayoutError: the model cannot be divided that way.
    """
    first = models[0]
    shape = read_model_shape(first.directory)
    check_generation_layout(shape, spec.layout)
    largest = max(max(prompt.token_ids) for prompt in prompts)
    if largest >= shape.vocab_size:
        raise DataError(f"prompts {spec.prompts}: token id {largest}, but model {first.name} has a vocabulary of "
                        f"{shape.vocab_size}; prepare the prompts with the model's tokenizer")
    for model in models[1:]:
        for key in sorted(first.config.keys() | model.config.keys()):
            ours, theirs = first.config.get(key), model.config.get(key)
            if ours != theirs:
                raise ModelError(
                    f"model {model.name} ({model.uri}): config.json has {key} = {theirs!r}, model {first.name} has "
                    f"{ours!r}; models of one evaluation must have one architecture")
        if model.tokenizer.get_vocab() != first.tokenizer.get_vocab():
            raise ModelError(f"model {model.name} ({model.uri}): its vocabulary is not that of model {first.name}; "
                             f"the prompts are tokenised once, for all models")


def _fetch(model: EvaluatedModel, job: Job) -> LocalModel:
    return LocalModel(model.name, model.uri, local_model(model.uri, job.dir / "models" / model.name, job.rank))


def _write(job: Job, spec: EvaluateSpec, found: Sequence[CachedEvaluation], prompts_hash: str) -> RunResult:
    """Samples first: whoever sees evaluation.json finds both."""
    samples, evaluation = job.dir / SAMPLES_FILE, job.dir / EVALUATION_FILE
    store.write_atomic(samples, "".join(s.model_dump_json() + "\n" for f in found for s in f.samples))
    models = [f.evaluation for f in found]
    store.write_atomic(evaluation, Evaluation(
        pass_threshold=spec.pass_threshold, models=models).model_dump_json(indent=1))
    metrics = {clean_metric_name(f"{m.model}/{name}"): value for m in models for name, value in m.metrics.items()}
    with Tracker(job.dir, spec.tracking) as tracker:
        tracker.log_input(DatasetInput("eval", prompts_hash, spec.prompts, "evaluation"))
        tracker.set_tags({f"weights.{m.model}": m.weights_hash for m in models})
        tracker.log(0, metrics)
        tracker.log_artifact(evaluation)
        tracker.log_artifact(samples)
    return RunResult(
        stage="evaluate", outputs={"evaluation": str(evaluation), "samples": str(samples)}, metrics=metrics,
        hashes={"prompts": prompts_hash, "settings": settings_hash(spec)}
        | {f"weights/{m.model}": m.weights_hash for m in models})
