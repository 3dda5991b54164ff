"""What tests of the Megatron backend share: rows, a loss with gradients everywhere, weights by Hugging Face name."""

import torch

from engine.batch import Sample, make_batch, shard, total_lengths

VOCAB = 101
"""Odd: padded under tp."""


def rows(count=12, vocab=VOCAB):
    """A batch of random prompts and responses of 1 to 12 tokens, with `signal` [B, R] to weigh outputs by.

    The last third answer one long prompt shortly: they share its tokens in training.
    """
    generator = torch.Generator().manual_seed(1)

    def draw(low, high):
        return int(torch.randint(low, high, (1,), generator=generator))

    samples, shared = [], [draw(0, vocab) for _ in range(14)]
    for index in range(count):
        alone = 3 * index < 2 * count
        prompt = [draw(0, vocab) for _ in range(draw(1, 9))] if alone else shared
        response = [draw(0, vocab) for _ in range(draw(1, 13) if alone else draw(1, 5))]
        samples.append(Sample(index, prompt, response, [0.0] * len(response), False))
    batch = make_batch(samples, 0)
    batch["signal"] = torch.randn(batch["rollout_logprobs"].shape, generator=generator) / count
    return batch


def replica_rows(world, minibatches=1):
    """The rows of this rank's replica."""
    return shard(rows(), minibatches, world.dp_size, world.dp_rank, 0)


def signal_loss(outputs, batch):
    """Outputs times fixed random weights: every token has a gradient of its own."""
    names = [name for name in ("logprobs", "values") if name in outputs]
    loss = sum((outputs[name] * batch["signal"]).sum() for name in names)
    if "entropy" in outputs:
        loss = loss + (outputs["entropy"] * batch["signal"].abs()).sum()
    return loss, {"rows": torch.tensor(float(len(batch)))}


def by_sample(results):
    """{sample id: [r] outputs} from the (sample_ids, lengths, outputs [B, R]) of all ranks, which must agree."""
    found = {}
    for ids, lengths, values in results:
        for sample, length, row in zip(ids.tolist(), lengths.tolist(), values, strict=True):
            assert not row[length:].any(), "slots beyond the response hold something"
            if sample in found:
                assert torch.equal(found[sample], row[:length]), f"ranks disagree on sample {sample}"
            found[sample] = row[:length]
    return found


def huggingface_outputs(model, batch, temperature):
    """{sample id: logprobs}, {sample id: entropies} by transformers, a row at a time without padding, with gradient."""
    logprobs, entropies = {}, {}
    lengths = total_lengths(batch).tolist()
    for row, (sample, total) in enumerate(zip(batch["sample_ids"].tolist(), lengths, strict=True)):
        ids, prompt = batch["input_ids"][row, :total], int(batch["prompt_lengths"][row])
        logits = model(ids[None]).logits[0, prompt - 1 : -1].float() / temperature
        table = logits.log_softmax(-1)
        logprobs[sample] = table.gather(1, ids[prompt:, None]).squeeze(1)
        entropies[sample] = -(table.exp() * table).sum(-1)
    return logprobs, entropies


def assemble(parts):
    """{tensor name: full tensor} from the (pieces, params) of all ranks; copies on several ranks must be bit-equal."""
    from engine.resharding.views import view_of

    full = {}
    for holdings, params in parts:
        for piece in holdings.pieces:
            whole = full.setdefault(piece.tensor, torch.full(holdings.tensors[piece.tensor].shape, torch.nan))
            target = whole[tuple(slice(start, stop) for start, stop in piece.box)]
            value = view_of(params[piece.param], piece, piece.box)
            assert target.isnan().all() or torch.equal(target, value), f"copies of {piece.tensor} differ"
            target.copy_(value)
    return full


def largest_difference(first, second):
    """Largest absolute difference of two {name: tensor}."""
    assert set(first) == set(second)
    return max(float((first[name] - second[name]).abs().max()) for name in first)


