"""A reward model beside other rewards, against transformers' sequence classifier."""

import shutil
from pathlib import Path

import pytest
import torch

from engine.batch import Sample, make_batch
from engine.errors import ModelError, SpecError
from engine.layout import ParallelLayout
from engine.prompts import Prompt
from engine.rewards.pool import ScoringPool
from engine.spec.reward import ExactMatchReward, LengthReward, RewardModelReward
from tests.engine.multiprocess import shared_ranks
from tests.engine.tiny_models import classifier_scores, make_reward_model, make_tiny_model

G = 2
RESPONSES = [[[5, 2], [6, 7, 2]], [[8, 9, 10, 2], [11, 2]], [[3, 4], [12, 2]]]
"""Token ids; the first response to the last prompt was cut off."""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A policy in `policy/`, and its weights with a random head in `reward_model/`."""
    root = tmp_path_factory.mktemp("models")
    make_reward_model(make_tiny_model(root / "policy"), root / "reward_model")
    return root


def rewards_of(models: Path, broken: bool = False):
    directory = models / ("broken" if broken else "reward_model")
    return [ExactMatchReward(weight=2), RewardModelReward(model=str(directory), weight=0.5), LengthReward()]


def rows(dp: int, dp_rank: int):
    prompts = [Prompt(id=f"p{p}", token_ids=(1, 20 + p, 30), text="q", answer="none of them") for p in range(3)]
    samples = [Sample(i, prompts[i // G].token_ids, RESPONSES[i // G][i % G], [0.0] * len(RESPONSES[i // G][i % G]),
                      truncated=i == 4) for i in [5, 0, 3, 2, 4, 1][dp_rank::dp]]
    return make_batch(samples, 0), prompts


def score_on_rank(models, rewards, layout):
    from engine.backends.megatron.parallel import start_world
    from engine.workers.reward import RewardWorker
    from engine.workers.scorers import Scorers, load_reward_models, pooled

    world = start_world(layout)
    batch, prompts = rows(world.dp_size, world.dp_rank)
    pool = ScoringPool(pooled(rewards), num_workers=1) if world.is_lead and pooled(rewards) else None
    try:
        scorers = Scorers(rewards, pool, load_reward_models(rewards, world, models / "policy", 16))
        worker = RewardWorker(scorers, models / "policy", world, max_response_tokens=8)
        scored = worker.score(batch, prompts, G)
        return dict(zip(scored["sample_ids"].tolist(), scored["scores"].tolist(), strict=True)), worker.take_metrics()
    finally:
        if pool:
            pool.close()


def by_transformers(models: Path) -> list[float]:
    """[P * G]."""
    return classifier_scores(models / "reward_model", [
        [1, 20 + p, 30, *response] for p, group in enumerate(RESPONSES) for response in group])


@pytest.mark.parametrize("layout", [ParallelLayout(), ParallelLayout(tp=2), ParallelLayout(pp=2), ParallelLayout(dp=2)])
def test_a_reward_model_adds_to_other_rewards_under_every_layout(models, layout):
    results = shared_ranks(layout.world_size).run(score_on_rank, models, rewards_of(models), layout)
    by_model = by_transformers(models)
    lengths = [len(response) for group in RESPONSES for response in group]
    # No response is its prompt's answer.
    expected = [0.5 * score - length / 8 for score, length in zip(by_model, lengths, strict=True)]
    scores = {sample: score for found, _ in results for sample, score in found.items()}
    assert [scores[i] for i in range(6)] == pytest.approx(expected, rel=1e-4, abs=1e-4)
    for _, metrics in results:
        assert metrics["reward/reward_model/mean"] == pytest.approx(sum(by_model) / 6, rel=1e-4, abs=1e-4)
        assert metrics["reward/mean"] == pytest.approx(sum(expected) / 6, rel=1e-4, abs=1e-4)
        assert metrics["reward/exact/mean"] == 0 and metrics["reward/reward_model/error_rate"] == 0


def test_a_reward_model_alone_needs_no_scoring_processes(models):
    (scores, metrics), = shared_ranks(1).run(score_on_rank, models, rewards_of(models)[1:2], ParallelLayout())
    expected = [0.5 * score for score in by_transformers(models)]
    assert [scores[i] for i in range(6)] == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert set(metrics) >= {"reward/mean", "reward/std", "reward/reward_model/mean"}


def test_a_score_that_is_not_finite_is_an_error_and_reaches_the_alarm(models):
    from safetensors.torch import load_file, save_file

    shutil.copytree(models / "reward_model", models / "broken", dirs_exist_ok=True)
    weights = load_file(models / "reward_model" / "model.safetensors")
    weights["score.weight"][0, 0] = torch.nan
    save_file(weights, models / "broken" / "model.safetensors", metadata={"format": "pt"})
    (scores, metrics), = shared_ranks(1).run(score_on_rank, models, rewards_of(models, broken=True), ParallelLayout())
    assert all(score != score for score in scores.values())
    assert metrics["reward/reward_model/error_rate"] == 1 and metrics["reward/exact/error_rate"] == 0


def test_what_is_no_reward_model_of_this_policy_is_refused(models, tmp_path):
    from engine.backends.megatron.parallel import start_world
    from engine.workers.scorers import load_reward_models
    from tests.engine.text_tokenizer import make_text_tokenizer

    world = start_world(ParallelLayout())

    def load(directory):
        return load_reward_models([RewardModelReward(model=str(directory))], world, models / "policy", 16)

    with pytest.raises(SpecError, match="must be a path that all ranks share"):
        load("s3://bucket/reward_model")
    with pytest.raises(ModelError, match="tensor score.weight .* is missing"):
        load(models / "policy")
    with pytest.raises(ModelError, match="cannot read config.json"):
        load(tmp_path / "nowhere")
    other = shutil.copytree(models / "reward_model", tmp_path / "other")
    make_text_tokenizer(other)
    with pytest.raises(ModelError, match="its vocabulary of .* is not the policy's of"):
        load(other)


def test_an_evaluation_is_cached_by_the_weights_of_its_reward_model_not_by_their_place(models, tmp_path):
    from engine import evaluate
    from engine.spec import parse_spec

    spec = parse_spec({
        "stage": "evaluate", "models": [{"name": "base", "uri": "/m"}], "prompts": "/p", "max_response_tokens": 4,
        "rewards": [{"kind": "reward_model", "model": str(tmp_path / "model")}]})
    hashes = []
    for source in ("reward_model", "policy", "reward_model"):
        shutil.copytree(models / source, tmp_path / "model", dirs_exist_ok=True)
        evaluate._hash_weights.cache_clear()
        hashes.append(evaluate.settings_hash(spec))
    assert hashes[0] == hashes[2] != hashes[1]
