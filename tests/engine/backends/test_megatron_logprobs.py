"""The fused heads against log_softmax and autograd."""

import pytest
import torch
import torch.distributed as dist

from tests.engine.multiprocess import shared_ranks


def compare(temperature, chunk, dtype_name, starts):
    """On every rank: logprobs, entropies and gradients of a vocabulary that is cut at `starts`."""
    from engine.backends.megatron import logprobs as head
    from engine.backends.megatron.parallel import start_world
    from engine.layout import ParallelLayout

    world = start_world(ParallelLayout(tp=len(starts) - 1))
    head.CHUNK_ELEMENTS = chunk
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, 6, generator=generator).to(getattr(torch, dtype_name)).requires_grad_()
    weight = torch.randn(starts[-1], 6, generator=generator).to(hidden.dtype)
    targets = torch.randint(0, starts[-1], (9,), generator=generator)
    up = torch.randn(2, 9, generator=generator)
    own = weight[starts[world.rank] : starts[world.rank + 1]].clone().requires_grad_()
    shard = head.VocabShard(own, starts[world.rank], world.groups.tp)
    logprobs, entropies, highest = head.token_logprobs(hidden, shard, targets, temperature, with_entropy=True)
    (logprobs * up[0] + entropies * up[1]).sum().backward()
    dist.all_reduce(hidden.grad, group=world.groups.tp)

    x, w = hidden.detach().float().requires_grad_(), weight.float().requires_grad_()
    table = (x @ w.t() / temperature).log_softmax(-1)
    expected, entropy = table.gather(1, targets[:, None]).squeeze(1), -(table.exp() * table).sum(-1)
    (expected * up[0] + entropy * up[1]).sum().backward()
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype_name == "float32" else {"rtol": 0.05, "atol": 0.1}
    torch.testing.assert_close(logprobs, expected, **close)
    torch.testing.assert_close(entropies, entropy, **close)
    torch.testing.assert_close(highest, table.amax(-1), **close)
    assert (logprobs >= highest).equal(targets == table.argmax(-1)) and not highest.requires_grad
    torch.testing.assert_close(hidden.grad.float(), x.grad, **close)
    torch.testing.assert_close(own.grad.float(), w.grad[starts[world.rank] : starts[world.rank + 1]], **close)
    with torch.no_grad():
        again, nothing, _ = head.token_logprobs(hidden, shard, targets, temperature, with_entropy=False)
    assert nothing is None
    torch.testing.assert_close(again, logprobs.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 50, 1 << 24])
def test_values_and_gradients_equal_autograd_of_log_softmax(temperature, chunk):
    shared_ranks(1).run(compare, temperature, chunk, "float32", [0, 23])


@pytest.mark.parametrize("starts", [[0, 12, 23], [0, 23, 23]], ids=["uneven", "a rank without vocabulary"])
def test_a_divided_vocabulary_changes_nothing(starts):
    shared_ranks(2).run(compare, 0.6, 50, "float32", starts)


def test_bfloat16_accumulates_in_float32():
    shared_ranks(1).run(compare, 0.6, 50, "bfloat16", [0, 23])


def extreme():
    from engine.backends.megatron.logprobs import VocabShard, token_logprobs

    shard = VocabShard(torch.tensor([[1e4], [-1e4], [0.0]]), 0, dist.group.WORLD)
    hidden = torch.ones(3, 1, requires_grad=True)
    logprobs, entropies, _ = token_logprobs(hidden, shard, torch.tensor([0, 1, 2]), 1.0, with_entropy=True)
    (logprobs + entropies).sum().backward()
    assert logprobs.tolist() == [0.0, -2e4, -1e4]
    assert entropies.tolist() == [0.0, 0.0, 0.0]
    assert hidden.grad.isfinite().all()


def test_huge_logits_stay_finite():
    shared_ranks(1).run(extreme)


def compare_full_kl(chunk, starts):
    """On every rank: the KL of two models' next tokens, and its gradient in one of them."""
    from engine.algorithms.kl import full_kl as slow_kl
    from engine.backends.megatron import logprobs
    from engine.backends.megatron.full_kl import NextTokens, full_kl
    from engine.backends.megatron.parallel import start_world
    from engine.layout import ParallelLayout

    world = start_world(ParallelLayout(tp=len(starts) - 1))
    logprobs.CHUNK_ELEMENTS = chunk
    generator = torch.Generator().manual_seed(0)
    hidden, ref_hidden = (torch.randn(9, size, generator=generator) for size in (6, 5))
    weight, ref_weight = (torch.randn(starts[-1], size, generator=generator) for size in (6, 5))
    hidden.requires_grad_()
    up = torch.randn(9, generator=generator)
    mine = slice(starts[world.rank], starts[world.rank + 1])
    own = weight[mine].clone().requires_grad_()
    kl = full_kl(NextTokens(hidden, logprobs.VocabShard(own, mine.start, world.groups.tp), 0.6),
                 NextTokens(ref_hidden, logprobs.VocabShard(ref_weight[mine], mine.start, world.groups.tp), 0.9))
    (kl * up).sum().backward()
    dist.all_reduce(hidden.grad, group=world.groups.tp)

    x, w = hidden.detach().double().requires_grad_(), weight.double().requires_grad_()
    expected = slow_kl((x @ w.t() / 0.6).log_softmax(-1)[None], (ref_hidden @ ref_weight.t() / 0.9).double()
                       .log_softmax(-1)[None], torch.ones(1, 9, dtype=torch.bool))[0]
    (expected * up).sum().backward()
    assert expected.min() > 0.1
    for found, wanted in ((kl, expected), (hidden.grad, x.grad), (own.grad, w.grad[mine])):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 50, 1 << 24])
@pytest.mark.parametrize("starts", [[0, 23], [0, 12, 23], [0, 23, 23]], ids=str)
def test_the_full_kl_and_its_gradient_equal_autograd_of_the_definition(chunk, starts):
    shared_ranks(len(starts) - 1).run(compare_full_kl, chunk, starts)


def same_extreme():
    from engine.backends.megatron.full_kl import NextTokens, full_kl
    from engine.backends.megatron.logprobs import VocabShard

    shard = VocabShard(torch.tensor([[1e4], [-1e4], [0.0]]), 0, dist.group.WORLD)
    hidden = torch.ones(3, 1, requires_grad=True)
    kl = full_kl(NextTokens(hidden, shard, 1.0), NextTokens(torch.ones(3, 1), shard, 1.0))
    kl.sum().backward()
    assert kl.tolist() == [0.0] * 3 and hidden.grad.tolist() == [[0.0]] * 3


def test_the_full_kl_to_itself_is_zero_with_huge_logits():
    shared_ranks(1).run(same_extreme)
