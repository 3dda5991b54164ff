import math

import pytest
import torch
from hypothesis import given

from engine.algorithms.kl import adapt_coefficient, estimate_kl, full_kl, kl_loss, penalise_rewards
from tests.engine.algorithms import slow
from tests.engine.algorithms.inputs import close, examples, masks, noise, poison, seeds

ESTIMATORS = ["k1", "k2", "k3"]
ONE = torch.ones(1, 1, dtype=torch.bool)


def policies(seed):
    """Logits of three policies over a vocabulary of four words: trained, reference, old."""
    return (noise(4, seed).requires_grad_(), noise(4, seed + 1), noise(4, seed + 2))


def exact_gradient(logits, reference):
    log_p, log_q = logits.log_softmax(0), reference.log_softmax(0)
    return torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(), logits)[0]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@examples
@given(mask=masks(), seed=seeds)
def test_estimates_equal_the_loop_whatever_stands_in_masked_slots(estimator, mask, seed):
    logprobs, ref = noise(mask.shape, seed), noise(mask.shape, seed + 1)
    result = estimate_kl(poison(logprobs, mask), poison(ref, mask, 1), mask, estimator)
    for b, row in enumerate(mask.tolist()):
        for r, on in enumerate(row):
            expected = slow.kl(estimator, logprobs[b, r].item(), ref[b, r].item()) if on else 0.0
            assert result[b, r].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_vectors():
    logprob, ref = torch.tensor([[-1.0]]), torch.tensor([[-2.0]])
    close(torch.cat([estimate_kl(logprob, ref, ONE, k) for k in ESTIMATORS]), [[1], [.5], [.36788]], 1e-5)
    close(torch.cat([estimate_kl(ref, logprob, ONE, k) for k in ESTIMATORS]), [[-1], [.5], [.71828]], 1e-5)


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="k4"):
        estimate_kl(torch.zeros(1, 1), torch.zeros(1, 1), ONE, "k4")


def test_k3_of_an_impossible_token_stays_finite():
    assert estimate_kl(torch.tensor([[-1000.0]]), torch.tensor([[0.0]]), ONE, "k3").isfinite().all()


@examples
@given(seed=seeds)
def test_k1_and_k3_have_the_kl_as_their_mean_by_enumeration(seed):
    logits, reference, _ = policies(seed)
    log_p, log_q = logits.detach().log_softmax(0), reference.log_softmax(0)
    exact = full_kl(log_p[None, None], log_q[None, None], ONE)
    for estimator in ("k1", "k3"):
        estimates = estimate_kl(log_p[None], log_q[None], torch.ones(1, 4, dtype=torch.bool), estimator)
        close((log_p.exp() * estimates[0]).sum(), exact[0, 0])
        assert estimator == "k1" or estimates.ge(0).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("on_policy", [True, False])
@examples
@given(seed=seeds)
def test_the_mean_gradient_of_the_kl_loss_is_the_gradient_of_the_kl(estimator, on_policy, seed):
    """OpenRLHF#1309, verl#2953: exact enumeration over a four-word vocabulary, also after the policy has moved."""
    logits, reference, old = policies(seed)
    if on_policy:
        old = logits.detach()
    log_p = logits.log_softmax(0)
    terms = kl_loss(log_p[None], reference.log_softmax(0)[None], old.log_softmax(0)[None],
                    torch.ones(1, 4, dtype=torch.bool), estimator)
    mean = (old.softmax(0) * terms[0]).sum()
    close(torch.autograd.grad(mean, logits)[0], exact_gradient(logits, reference), 1e-8)
    if estimator != "k2":
        log_p, log_q = log_p.detach(), reference.log_softmax(0)
        close(mean, (log_p.exp() * (log_p - log_q)).sum(), 1e-8)


def test_differentiating_k1_and_k3_as_they_stand_would_be_wrong():
    """The fault that `kl_loss` avoids: k1's mean gradient is zero, k3's is that of the reverse KL."""
    logits, reference, _ = policies(5)
    log_p = logits.log_softmax(0)
    naive = {}
    for estimator in ESTIMATORS:
        terms = estimate_kl(log_p[None], reference.log_softmax(0)[None], torch.ones(1, 4, dtype=torch.bool), estimator)
        mean = (log_p.detach().exp() * terms[0]).sum()
        naive[estimator] = torch.autograd.grad(mean, logits, retain_graph=True)[0]
    assert naive["k1"].abs().max() < 1e-12
    close(naive["k3"], logits.softmax(0) - reference.softmax(0))
    close(naive["k2"], exact_gradient(logits, reference))


def test_over_two_tokens_the_gradient_is_that_of_the_kl_at_the_visited_states():
    """A policy with one table of logits per state (start, and after each word): all 16 sequences enumerated."""
    tables = noise((5, 4), 1).requires_grad_()
    reference, old = noise((5, 4), 2), tables.detach() + noise((5, 4), 3, .3)
    total, visits = 0.0, torch.zeros(5, dtype=torch.float64)
    for first in range(4):
        for second in range(4):
            states, words = [0, 1 + first], [first, second]
            rows = [x.log_softmax(1)[states, words][None] for x in (tables, reference, old)]
            probability = rows[2].sum().exp()
            total = total + probability * kl_loss(*rows, torch.ones(1, 2, dtype=torch.bool), "k3").sum()
    visits[0], visits[1:] = 1.0, old.log_softmax(1)[0].exp()
    log_p, log_q = tables.log_softmax(1), reference.log_softmax(1)
    exact = (visits * (log_p.exp() * (log_p - log_q)).sum(1)).sum()
    close(torch.autograd.grad(total, tables)[0], torch.autograd.grad(exact, tables)[0], 1e-8)


def test_k1_in_the_reward_gives_the_policy_the_gradient_of_the_kl_and_k3_does_not():
    logits, reference, _ = policies(9)
    log_p, log_q = logits.log_softmax(0), reference.log_softmax(0)
    mask = torch.ones(1, 4, dtype=torch.bool)
    gradients = {}
    for estimator in ("k1", "k3"):
        kl = estimate_kl(log_p.detach()[None], log_q[None], mask, estimator)
        rewards = penalise_rewards(torch.zeros(1, 4, dtype=torch.float64), kl, 0.5)
        objective = (log_p.detach().exp() * rewards[0] * log_p).sum()
        gradients[estimator] = torch.autograd.grad(objective, logits, retain_graph=True)[0]
    exact = -0.5 * exact_gradient(logits, reference)
    close(gradients["k1"], exact)
    assert (gradients["k3"] - exact).abs().max() > 1e-2


@examples
@given(mask=masks(), seed=seeds)
def test_the_kl_loss_is_finite_with_garbage_in_masked_slots(mask, seed):
    trained = poison(noise(mask.shape, seed), mask).requires_grad_()
    others = [poison(noise(mask.shape, seed + i), mask, i) for i in (1, 2)]
    terms = kl_loss(trained, *others, mask, "k3")
    terms.sum().backward()
    assert terms.isfinite().all() and terms[~mask].eq(0).all()
    assert trained.grad.isfinite().all() and trained.grad[~mask].eq(0).all()


def test_full_kl_counts_impossible_words_as_nothing_and_ignores_masked_positions():
    log_p = torch.tensor([[[0.0, -math.inf], [math.nan, math.nan]]])
    log_q = torch.tensor([[[math.log(.5), math.log(.5)], [math.nan, 0.0]]])
    close(full_kl(log_p, log_q, torch.tensor([[True, False]])), [[math.log(2), 0]], 1e-6)


def test_full_kl_differentiates_to_the_gradient_of_the_kl():
    logits, reference, _ = policies(3)
    value = full_kl(logits.log_softmax(0)[None, None], reference.log_softmax(0)[None, None], ONE).sum()
    close(torch.autograd.grad(value, logits)[0], exact_gradient(logits, reference))


def test_the_controller_moves_towards_its_target_by_at_most_a_fifth_a_horizon():
    assert adapt_coefficient(.2, 12, 6, 256, 10_000) == pytest.approx(.201024)
    assert adapt_coefficient(.2, 0, 6, 10_000, 10_000) == pytest.approx(.16)
    assert adapt_coefficient(.2, 6, 6, 10_000, 10_000) == .2
    assert adapt_coefficient(.2, 6.6, 6, 1000, 10_000) == pytest.approx(.2 * 1.01)


@pytest.mark.parametrize("kl", [math.nan, math.inf, -math.inf])
def test_the_controller_ignores_a_kl_that_is_not_finite(kl):
    assert adapt_coefficient(.2, kl, 6, 256, 10_000) == .2
