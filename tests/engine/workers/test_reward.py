from types import SimpleNamespace

import pytest
import torch

from engine.batch import Sample, make_batch
from engine.layout import ParallelLayout
from engine.prompts import Prompt
from engine.rewards.pool import ScoringPool
from engine.spec.reward import ExactMatchReward, LengthReward, NumericMatchReward
from engine.workers.reward import RewardWorker, response_texts
from engine.workers.scorers import Scorers
from tests.engine.multiprocess import shared_ranks
from tests.engine.text_tokenizer import make_text_tokenizer

REWARDS = [ExactMatchReward(pattern=r"(\d+)", weight=2), NumericMatchReward(on_error=-1), LengthReward(weight=0.5)]
G = 2
ANSWERS = ["1", "2", "three"]
RESPONSES = [["1", "one"], ["2", "3"], ["three", "4"]]


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory):
    return make_text_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def load(directory):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def expected_scores():
    """[P * G] by hand: 2 * exact + numeric - 0.5 * tokens / 8."""
    tokens = [[len(text) + 1 for text in group] for group in RESPONSES]
    exact_and_numeric = [[2 + 1, 0 + 0], [2 + 1, 0 + 0], [0 - 1, 0 - 1]]
    return [exact_and_numeric[p][g] - 0.5 * tokens[p][g] / 8 for p in range(3) for g in range(G)]


def make_rows(tokenizer, dp: int, dp_rank: int):
    """This replica's rows, in a shuffled order, and the prompts of the iteration."""
    prompts = [Prompt(id=f"p{p}", token_ids=tuple(tokenizer.encode(f"q{p}")), text=f"q{p}", answer=answer)
               for p, answer in enumerate(ANSWERS)]
    samples = []
    for sample_id in [5, 0, 3, 2, 4, 1][dp_rank::dp]:
        ids = [tokenizer.convert_tokens_to_ids(c) for c in RESPONSES[sample_id // G][sample_id % G]]
        ids.append(tokenizer.eos_token_id)
        samples.append(Sample(sample_id, prompts[sample_id // G].token_ids, ids, [0.0] * len(ids), truncated=False))
    return make_batch(samples, 0), prompts


def score_on_rank(directory, layout):
    from engine.backends.megatron.parallel import start_world

    world = start_world(layout)
    batch, prompts = make_rows(load(directory), world.dp_size, world.dp_rank)
    pool = ScoringPool(REWARDS, num_workers=1) if world.is_lead else None
    try:
        worker = RewardWorker(Scorers(REWARDS, pool), directory, world, max_response_tokens=8)
        scored = worker.score(batch, prompts, G)
        scores = dict(zip(scored["sample_ids"].tolist(), scored["scores"].tolist(), strict=True))
        metrics = worker.take_metrics()
        return scores, metrics, worker.take_metrics(), str(scored["scores"].dtype)
    finally:
        if pool:
            pool.close()


@pytest.mark.parametrize("layout", [ParallelLayout(tp=2), ParallelLayout(pp=2), ParallelLayout(dp=2)])
def test_scores_and_metrics_are_the_same_under_every_layout(tokenizer_dir, layout):
    results = shared_ranks(2).run(score_on_rank, tokenizer_dir, layout)
    scores = {}
    for rank_scores, _, _, dtype in results:
        assert dtype == "torch.float32"
        scores |= rank_scores
    by_hand = expected_scores()
    assert [scores[i] for i in range(6)] == pytest.approx(by_hand)
    if layout.dp == 1:
        assert results[0][0] == results[1][0]
    for _, metrics, after, _ in results:
        assert metrics["reward/mean"] == pytest.approx(sum(by_hand) / 6)
        assert metrics["reward/std"] == pytest.approx(torch.tensor(by_hand).std(unbiased=False).item())
        assert metrics["reward/exact/mean"] == pytest.approx(2 / 6)
        assert metrics["reward/exact/format_error_rate"] == pytest.approx(2 / 6)
        assert metrics["reward/numeric/error_rate"] == pytest.approx(2 / 6)
        assert metrics["reward/numeric/timeout_rate"] == 0 and metrics["reward/errors"] == 2
        assert after == {}, "taken metrics are not given twice"


def test_rows_of_other_prompts_are_never_scored(tokenizer_dir):
    tokenizer = load(tokenizer_dir)
    batch, prompts = make_rows(tokenizer, 1, 0)
    world = SimpleNamespace(is_lead=True, rank=0, dp_size=1, device=torch.device("cpu"))
    with ScoringPool(REWARDS, num_workers=1) as pool:
        worker = RewardWorker(Scorers(REWARDS, pool), tokenizer_dir, world, max_response_tokens=8)
        with pytest.raises(AssertionError, match="does not start with the tokens of prompt"):
            worker.score(batch, prompts[::-1], G)
        with pytest.raises(AssertionError, match="samples_per_prompt is not 3"):
            worker.score(batch, prompts, 3)


def test_the_end_token_goes_and_no_other(tokenizer_dir):
    tokenizer = load(tokenizer_dir)
    end, user = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|user|>")
    a = tokenizer.convert_tokens_to_ids("a")
    texts = response_texts(tokenizer, [[a, end], [a, end], [end], [a, user, a, end], [a, end, end]],
                           [False, True, False, False, False])
    assert texts == ["a", "a<|end|>", "", "a<|user|>a", "a<|end|>"]
