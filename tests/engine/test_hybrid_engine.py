"""Megatron and vLLM in the same processes: what is served is what is trained, in every layout, and nothing else is."""

from pathlib import Path

import pytest

from engine.backends.vllm.requests import Request
from engine.errors import ReshardError
from engine.layout import GenerationLayout, ParallelLayout
from engine.prompts import Prompt
from tests.engine.multiprocess import run_ranks
from tests.engine.tiny_models import make_tiny_model
from tests.engine.vllm_process import generator, in_vllm

REQUESTS = [Request([3 + i, 9, 12 + i] * 14, seed=i, max_tokens=10) for i in range(6)]
"""Long enough for a block of the prefix cache."""
PROMPTS = [Prompt(id=str(p), token_ids=tuple(3 + (7 * p + t) % 60 for t in range(2 + 5 * p)), text="")
           for p in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("hybrid") / "tiny", "llama", tie_word_embeddings=True)


class Policy:
    """A Megatron policy and the hybrid engine that serves it, on this rank."""

    def __init__(self, directory: Path, layout: ParallelLayout, served, generation: GenerationLayout):
        from engine.backends.megatron.parallel import start_world
        from engine.backends.megatron.trainer import Model, load_network
        from engine.hybrid_engine import HybridEngine
        from engine.layout import read_model_shape
        from engine.resharding.execute import SyncOptions, WeightSync
        from engine.resharding.megatron import MegatronSharding
        from engine.resharding.plan import plan_rank
        from engine.resharding.vllm import VllmSharding

        self.world = start_world(layout)
        self.model = Model(self.world, load_network(directory, self.world, "logprobs"), token_budget=1024)
        shape = read_model_shape(directory)
        plan = plan_rank(MegatronSharding(shape, layout), VllmSharding(shape, generation, layout.world_size),
                         self.world.rank)
        self.served = served
        self.sync = WeightSync(plan, self.model.params(), served.params(), None, SyncOptions(timeout_s=60))
        self.version = 0
        self.engine = HybridEngine(served, self.sync, lambda: self.version)

    def update(self, factor: float = 1.05) -> None:
        """Another policy version: every weight changes, equally on all ranks."""
        import torch

        with torch.no_grad():
            for value in self.model.params().values():
                value.mul_(factor)
        self.version += 1

    def logprob_gap(self, batch) -> float:
        """Largest difference between what the sampler and what the trainer say of a sampled token."""
        from engine.backends.megatron.heads import LogprobHead
        from engine.batch import response_mask

        ours = self.model.forward(batch, LogprobHead(1.0))["logprobs"]
        return float(((ours - batch["rollout_logprobs"]).abs() * response_mask(batch)).max())


def policy(directory: Path) -> Policy:
    return Policy(directory, ParallelLayout(), generator(directory), GenerationLayout())


def batch_of(responses):
    from engine.batch import Sample, make_batch

    return make_batch([Sample(i, q.prompt_ids, r.token_ids, r.logprobs, r.truncated)
                       for i, (q, r) in enumerate(zip(REQUESTS, responses, strict=True))], 0)


def test_after_every_update_the_served_policy_is_the_trained_one(model):
    """The same prompts each time: a prefix cache of the last version would show as a gap."""
    gaps, texts, transitions = in_vllm(_three_updates, model)
    assert max(gaps) < 1e-4
    assert texts[0] != texts[1] != texts[2]
    assert [t.moved for t in transitions] == [True, True, True]
    assert [t.policy_version for t in transitions] == [0, 1, 2]


def _three_updates(directory: Path):
    p, gaps, texts, transitions = policy(directory), [], [], []
    for _ in range(3):
        transitions.append(p.engine.switch_mode("generate"))
        responses = p.engine.generate(REQUESTS)
        p.engine.switch_mode("train")
        gaps.append(p.logprob_gap(batch_of(responses)))
        texts.append([r.token_ids for r in responses])
        p.update()
    return gaps, texts, transitions


def test_nothing_moves_and_nothing_is_given_back_until_the_version_or_the_memory_need_changes(model):
    in_vllm(_no_thrash, model)


def _no_thrash(directory: Path) -> None:
    p = policy(directory)
    p.engine.switch_mode("generate")
    first = p.engine.generate(REQUESTS)
    storage = p.served._kv_storage()
    memory = storage.data_ptr()
    for mode in ("generate", "train", "generate", "train"):
        transition = p.engine.switch_mode(mode)
        assert (transition.moved, transition.bytes_received, transition.bytes_sent) == (False, 0, 0)
        assert storage.data_ptr() == memory and storage.nbytes() == 16 << 20
    p.engine.release()
    assert storage.nbytes() == 0
    assert not p.engine.switch_mode("generate").moved, "on CPU the weights stay while the KV cache is away"
    assert storage.nbytes() == 16 << 20
    assert p.engine.generate(REQUESTS) == first


def test_nothing_is_generated_from_any_but_the_trained_weights(model):
    """FAULTS 21, a failed transfer, and a caller who forgets to switch."""
    in_vllm(_refusals, model)


def _refusals(directory: Path) -> None:
    p = policy(directory)
    with pytest.raises(ReshardError, match="in mode 'train'"):
        p.engine.generate(REQUESTS)
    p.engine.switch_mode("generate")
    with pytest.raises(ReshardError, match="in mode 'generate'"):
        p.engine.release()
    p.update()
    with pytest.raises(ReshardError, match="holds policy version 0, asked for 1"):
        p.engine.generate(REQUESTS)

    transfer, p.sync._transfer = p.sync._transfer, _broken_transfer
    for _ in range(2):
        with pytest.raises(ReshardError, match="rank 3 is gone"):
            p.engine.switch_mode("generate")
        with pytest.raises(ReshardError):
            p.engine.generate(REQUESTS)
    p.sync._transfer = transfer
    assert p.engine.switch_mode("generate").moved
    assert p.logprob_gap(batch_of(p.engine.generate(REQUESTS))) < 1e-4

    # Something writes over the served weights while nobody looks.
    p.engine.switch_mode("train")
    next(iter(p.served.params().values())).data.view(-1)[5] += 1e-3
    with pytest.raises(ReshardError, match="something wrote over them"):
        p.engine.switch_mode("generate")
    with pytest.raises(ReshardError):
        p.engine.generate(REQUESTS)
    assert p.engine.switch_mode("generate").moved
    assert p.logprob_gap(batch_of(p.engine.generate(REQUESTS))) < 1e-4


def _broken_transfer(program):
    raise ReshardError("rank 3 is gone")


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_samples_are_the_same_under_every_layout_and_equal_the_trainers_logprobs(model, tp):
    """Megatron tp=2, pp=2 and dp=2 into vLLM tp=1 (two replicas) and tp=2, against one process."""
    (expected, _, _), = in_vllm(_sample, model, [ParallelLayout()], 1)
    layouts = [ParallelLayout(tp=2), ParallelLayout(pp=2), ParallelLayout(dp=2)]
    ranks = run_ranks(_sample, 2, model, layouts, tp, timeout_s=500)
    for index, layout in enumerate(layouts):
        found = {}
        for samples, gap, transition in (rank[index] for rank in ranks):
            assert gap < 1e-4, layout
            assert transition.moved and transition.policy_version == 1
            found |= samples
        assert found == expected, layout
        received = sum(rank[index][2].bytes_received for rank in ranks)
        assert (received == 0) == (layout.pp == 1 and layout.tp in (1, tp)), layout


def _sample(directory: Path, layouts: list[ParallelLayout], tp: int) -> list[tuple]:
    from engine.workers.rollout import Replicas, Rollout, RolloutPlan

    generation = GenerationLayout(tp)
    served = generator(directory) if tp == 1 else _tensor_parallel_generator(directory, generation)
    replicas, results = Replicas(generation), []
    for layout in layouts:
        p = Policy(directory, layout, served, generation)
        p.update()
        rollout = Rollout(p.engine.generate, replicas, RolloutPlan(
            samples_per_prompt=4, max_response_tokens=12, temperature=1.0, seed=5, minibatches=2, dp=layout.dp,
            dp_rank=p.world.dp_rank))
        transition = p.engine.switch_mode("generate")
        batch = rollout.generate(PROMPTS, iteration=1, policy_version=p.version)
        p.engine.switch_mode("train")
        p.engine.release()
        lengths = (batch["prompt_lengths"] + batch["response_lengths"]).tolist()
        samples = {i: (ids[:n], minibatch) for i, ids, n, minibatch in zip(
            batch["sample_ids"].tolist(), batch["input_ids"].tolist(), lengths, batch["minibatch_ids"].tolist(),
            strict=True)}
        results.append((samples, p.logprob_gap(batch), transition))
    return results


def _tensor_parallel_generator(directory: Path, generation: GenerationLayout):
    from engine.backends.vllm.generator import Generator
    from engine.backends.vllm.requests import GeneratorConfig
    from engine.ranks import join_ranks

    join_ranks()
    return Generator(directory, generation, GeneratorConfig(
        max_model_len=96, kv_cache_bytes=16 << 20, max_concurrent_sequences=16))
