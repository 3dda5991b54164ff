"""Dealing samples to replicas and collecting them; no vLLM here: a response is a function of its request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.backends.vllm.requests import Request, Response
from engine.errors import FaultError
from engine.layout import GenerationLayout, ParallelLayout
from engine.prompts import Prompt
from engine.workers.rollout import Replicas, Rollout, RolloutPlan, deal, sample_seed
from tests.engine.multiprocess import shared_ranks

PROMPTS = [Prompt(id=str(p), token_ids=tuple(range(3, 5 + p % 5)), text="") for p in range(6)]


@given(st.integers(1, 20), st.integers(1, 8), st.integers(1, 8))
def test_every_sample_is_dealt_once_evenly_and_prompts_stay_together_where_they_can(prompts, group, replicas):
    shares = deal(prompts, group, replicas)
    assert sorted(sample for share in shares for sample in share) == list(range(prompts * group))
    if prompts * group % replicas == 0:
        assert len({len(share) for share in shares}) == 1
    homes = [{index for index, share in enumerate(shares) for s in share if s // group == p} for p in range(prompts)]
    assert sum(len(home) > 1 for home in homes) <= prompts % replicas


def test_seeds_differ_between_runs_iterations_and_samples():
    numbers = [(run, iteration, sample) for run in range(5) for iteration in range(5) for sample in range(-1, 40)]
    seeds = {sample_seed(*number) for number in numbers}
    assert len(seeds) == 5 * 5 * 41
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(0, 11, 1) != sample_seed(0, 1, 11)


def answer(requests: list[Request]) -> list[Response]:
    """1 to 7 tokens that depend on the whole request."""
    responses = []
    for r in requests:
        length = 1 + r.seed % r.max_tokens
        tokens = [(r.seed >> k) % 61 + sum(r.prompt_ids) for k in range(length)]
        responses.append(Response(tokens, [-1 / (1 + t + r.temperature) for t in tokens], r.seed % 3 == 0))
    return responses


def rollout(tp: int, layout: ParallelLayout, greedy: bool = False):
    import torch.distributed as dist

    from engine.ranks import join_ranks

    join_ranks()
    dp_rank = layout.coords(dist.get_rank()).dp if layout.dp > 1 else 0
    plan = RolloutPlan(samples_per_prompt=4, max_response_tokens=7, temperature=0.5, seed=9, minibatches=2,
                       dp=layout.dp, dp_rank=dp_rank)
    worker = Rollout(answer, Replicas(GenerationLayout(tp)), plan)
    batch = worker.generate(PROMPTS, iteration=3, policy_version=2, greedy=greedy)
    return {name: value.tolist() for name, value in batch.items()}, worker.metrics


def rows(batches: list[dict]) -> dict[int, tuple]:
    """By sample id, without padding."""
    found = {}
    for batch in batches:
        for row, sample_id in enumerate(batch["sample_ids"]):
            prompt, response = batch["prompt_lengths"][row], batch["response_lengths"][row]
            found[sample_id] = (batch["input_ids"][row][: prompt + response], batch["truncated"][row],
                                batch["rollout_logprobs"][row][:response], batch["policy_versions"][row],
                                batch["minibatch_ids"][row])
    return found


@pytest.mark.parametrize("greedy", [False, True])
def test_rows_are_the_same_for_every_number_of_replicas_and_every_training_layout(greedy):
    group = 1 if greedy else 4
    results = [shared_ranks(4).run(rollout, tp, layout, greedy)
               for tp, layout in ((1, ParallelLayout(dp=4)), (2, ParallelLayout(tp=2, dp=2)), (4, ParallelLayout(pp=4)))
               if not (greedy and layout.dp == 4)]
    by_hand = {}
    for sample_id in range(len(PROMPTS) * group):
        prompt = PROMPTS[sample_id // group].token_ids
        request = Request(prompt, sample_seed(9, 3, sample_id), 7, 0.0 if greedy else 0.5)
        (response,) = answer([request])
        by_hand[sample_id] = ([*request.prompt_ids, *response.token_ids], response.truncated,
                              pytest.approx(response.logprobs, rel=1e-6), 2)
    minibatches = []
    for ranks in results:
        found = rows([batch for batch, _ in ranks])
        assert {i: row[:4] for i, row in found.items()} == by_hand
        minibatches.append({i: row[4] for i, row in found.items()})
        assert len({metrics["rollout/response_tokens_mean"] for _, metrics in ranks}) == 1
    assert all(m == minibatches[0] for m in minibatches)


def test_metrics_are_counted_over_all_replicas():
    _, metrics = shared_ranks(4).run(rollout, 1, ParallelLayout(dp=4))[2]
    responses = answer([Request(PROMPTS[i // 4].token_ids, sample_seed(9, 3, i), 7, 0.5) for i in range(24)])
    assert metrics["rollout/response_tokens_max"] == max(len(r.token_ids) for r in responses)
    assert metrics["rollout/truncated_share"] == pytest.approx(sum(r.truncated for r in responses) / 24)
    assert metrics["rollout/response_tokens_mean"] == pytest.approx(sum(len(r.token_ids) for r in responses) / 24)
    assert metrics["rollout/tokens_per_s"] > 0


def test_ranks_of_a_replica_that_sampled_differently_are_found():
    messages = shared_ranks(4).run(_diverge)
    assert all("the ranks of a replica must generate the same tokens" in message for message in messages)


def _diverge() -> str:
    import torch.distributed as dist

    from engine.ranks import join_ranks

    join_ranks()
    replicas = Replicas(GenerationLayout(2))
    token = 7 if dist.get_rank() == 3 else 6
    with pytest.raises(FaultError) as caught:
        replicas.gather({replicas.index: Response([token], [-1.0], False)})
    return str(caught.value)
