"""The vLLM generator against transformers, and against itself in other batches, with other weights, after sleeping."""

import random
from pathlib import Path

import pytest

from engine.backends.vllm.requests import Request
from engine.errors import ModelError
from tests.engine.tiny_models import EOS, copy_with_new_weights, make_tiny_model
from tests.engine.vllm_process import generator, in_vllm

FAMILIES = {"llama": True, "qwen2": False, "qwen3": True}
"""Family -> tied embeddings."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def requests(count: int, temperature: float = 1.0, seed: int = 7) -> list[Request]:
    """Prompts of 1 to 40 tokens; one prompt in three is the one before."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 64) for _ in range(rng.randrange(1, 41))] for _ in range(count)]
    prompts = [prompts[i - 1] if i % 3 == 1 else p for i, p in enumerate(prompts)]
    return [Request(p, seed=rng.getrandbits(63), max_tokens=24, temperature=temperature) for p in prompts]


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_logprobs_and_greedy_tokens_are_those_of_transformers(tmp_path, family):
    directory = make_tiny_model(tmp_path / family, family, tie_word_embeddings=FAMILIES[family])
    gap, wrong = in_vllm(_compare_with_transformers, directory)
    assert gap < 1e-4
    assert wrong == 0


def _compare_with_transformers(directory: Path) -> tuple[float, int]:
    """Largest logprob gap at temperatures 1 and 0.7; greedy tokens that are not the argmax."""
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    gap, wrong = 0.0, 0
    for temperature in (1.0, 0.7, 0.0):
        asked = requests(6, temperature)
        for request, response in zip(asked, generator(directory).generate(asked), strict=True):
            ids = torch.tensor([[*request.prompt_ids, *response.token_ids]])
            with torch.no_grad():
                logits = reference(ids).logits[0, len(request.prompt_ids) - 1 : -1]
            logprobs = (logits / (temperature or 1.0)).log_softmax(-1)
            sampled = torch.tensor(response.token_ids)
            ours = torch.tensor(response.logprobs)
            gap = max(gap, float((logprobs.gather(1, sampled[:, None])[:, 0] - ours).abs().max()))
            if temperature == 0:
                wrong += int((logits.argmax(-1) != sampled).sum())
    return gap, wrong


def test_a_response_ends_with_the_end_token_or_is_truncated(model):
    responses = in_vllm(_generate, model, requests(40))
    assert {r.truncated for r in responses} == {True, False}
    for response in responses:
        assert EOS not in response.token_ids[:-1]
        assert (response.token_ids[-1] == EOS) != response.truncated
        assert len(response.token_ids) == 24 if response.truncated else len(response.token_ids) <= 24
        assert len(response.logprobs) == len(response.token_ids)


def _generate(directory: Path, asked: list[Request], max_concurrent_sequences: int = 16) -> list:
    return generator(directory, max_concurrent_sequences).generate(asked)


def test_a_response_depends_on_its_request_alone(model):
    """FAULTS 23: engines that decode 1, 3 or 16 sequences at once, and batches of other sizes and orders."""
    asked = requests(16) + requests(4, temperature=0.0, seed=3)
    expected = in_vllm(_tokens, model, asked, 16)
    assert len({tuple(tokens) for tokens in expected}) > 12
    assert in_vllm(_tokens, model, asked, 1) == expected
    assert in_vllm(_tokens, model, asked, 3) == expected
    assert in_vllm(_tokens, model, asked[::-1], 16) == expected[::-1]
    assert [in_vllm(_tokens, model, [request], 16)[0] for request in asked[:3]] == expected[:3]


def _tokens(directory: Path, asked: list[Request], max_concurrent_sequences: int) -> list[list[int]]:
    return [r.token_ids for r in generator(directory, max_concurrent_sequences).generate(asked)]


def test_samples_follow_the_models_distribution(model):
    """4,000 first tokens against the softmax of transformers, by a chi-square bound that fails once in 10,000."""
    statistic, degrees = in_vllm(_chi_square, model, 4000)
    assert statistic < degrees + 3.72 * (2 * degrees) ** 0.5 + 10


def _chi_square(directory: Path, count: int) -> tuple[float, int]:
    import torch
    from transformers import AutoModelForCausalLM

    prompt = [5, 9, 30]
    asked = [Request(prompt, seed=seed, max_tokens=1) for seed in range(count)]
    drawn = torch.tensor([r.token_ids[0] for r in generator(directory).generate(asked)])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(directory)(torch.tensor([prompt])).logits[0, -1]
    expected = logits.softmax(-1) * count
    observed = torch.bincount(drawn, minlength=64).float()
    likely = expected >= 5
    expected = torch.cat([expected[likely], expected[~likely].sum()[None]])
    observed = torch.cat([observed[likely], observed[~likely].sum()[None]])
    return float(((observed - expected) ** 2 / expected.clamp(min=1e-9)).sum()), int(likely.sum())


def test_no_prompt_is_answered_from_a_cache_of_old_weights(model, tmp_path):
    """FAULTS 20: the same prompts before and after a change of weights, and on an engine that never had others."""
    other = copy_with_new_weights(model, tmp_path / "other", seed=1)
    asked = [Request(r.prompt_ids * 3, seed=r.seed, max_tokens=8) for r in requests(6) if len(r.prompt_ids) < 25]
    before, after, stale, fresh = in_vllm(_across_weights, model, other, asked)
    assert before != after
    assert after == fresh
    assert stale != fresh, "without the reset the cache must have mattered, or this test shows nothing"


def _across_weights(directory: Path, other: Path, asked: list[Request]) -> tuple:
    import torch

    engine = generator(directory)
    asked = asked * 2
    before = [r.logprobs for r in engine.generate(asked)]
    engine.load(other)
    after = [r.logprobs for r in engine.generate(asked)]
    fresh = [r.logprobs for r in generator(other, 15).generate(asked)]
    engine.load(directory)
    engine.generate(asked)
    with torch.no_grad():
        for name, new in generator(other, 15).params().items():
            engine.params()[name].copy_(new)
    stale = [r.logprobs for r in engine.generate(asked)]
    return before, after, stale, fresh


def test_weights_written_in_place_are_the_weights_that_generate(model, tmp_path):
    other = copy_with_new_weights(model, tmp_path / "other", seed=2)
    copied, loaded, fingerprints = in_vllm(_copy_in_place, model, other, requests(5))
    assert copied == loaded
    assert fingerprints[0] != fingerprints[1] == fingerprints[2]


def _copy_in_place(directory: Path, other: Path, asked: list[Request]) -> tuple:
    import torch

    engine = generator(directory)
    fingerprints = [engine.fingerprint()]
    with torch.no_grad():
        for name, new in generator(other, 15).params().items():
            engine.params()[name].copy_(new)
    engine.weights_changed()
    fingerprints += [engine.fingerprint(), generator(other, 15).fingerprint()]
    return engine.generate(asked), generator(other, 15).generate(asked), fingerprints


def test_any_changed_weight_changes_the_fingerprint(model):
    assert in_vllm(_fingerprints, model) == 1 + 3


def _fingerprints(directory: Path) -> int:
    import torch

    engine = generator(directory)
    seen = {engine.fingerprint()}
    names = list(engine.params())
    with torch.no_grad():
        for name in (names[0], names[3], names[-1]):
            engine.params()[name].view(-1)[-1].add_(1e-6)
            seen.add(engine.fingerprint())
        engine.load(directory)
        seen.add(engine.fingerprint())
    return len(seen)


def test_sleeping_gives_memory_back_and_changes_nothing(model):
    """FAULTS 21, and NaNs in recycled memory."""
    held, before, after, refusal = in_vllm(_sleep, model, requests(12))
    assert held == [16 << 20, 0, 16 << 20]
    assert after == before
    assert "sleeps (kv_cache)" in refusal


def _sleep(directory: Path, asked: list[Request]) -> tuple:
    import torch

    engine = generator(directory)
    before = engine.generate(asked)
    held = [engine._kv_storage().nbytes()]
    fingerprint = engine.fingerprint()
    torch.empty(0, dtype=torch.float32).set_(engine._kv_storage()).fill_(float("nan"))
    engine.sleep()
    engine.sleep()
    held.append(engine._kv_storage().nbytes())
    try:
        engine.generate(asked)
    except RuntimeError as error:
        refusal = str(error)
    # What the allocator hands out next was somebody's: here NaNs.
    recycled = torch.full((4 << 20,), float("nan"))
    del recycled
    for tag in ("weights", "kv_cache", "kv_cache"):
        engine.wake(tag)
    held.append(engine._kv_storage().nbytes())
    assert engine.fingerprint() == fingerprint
    return held, before, engine.generate(asked), refusal


def test_the_process_is_left_as_it_was(model):
    in_vllm(_process_state, model)


def _process_state(directory: Path) -> None:
    import random as python_random

    import numpy as np
    import torch

    engine = generator(directory)
    torch.set_num_threads(2)
    assert torch.get_num_threads() == 2, "vLLM's no-op in place of torch.set_num_threads must be gone"
    torch.set_num_threads(1)
    states = []
    for _ in range(2):
        states.append((torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), python_random.getstate()))
        engine.generate(requests(3))
        generator(directory, 14 if len(states) == 1 else 13)
    states.append((torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), python_random.getstate()))
    assert states[0] == states[1] == states[2]


def test_token_ids_survive_whatever_the_tokenizer_would_make_of_them(model):
    """FAULTS 22: ids are never turned into text on the way; `[4, 4]` stays two tokens and fillers stay fillers."""
    rng = random.Random(0)
    asked = [Request([rng.randrange(64) for _ in range(30)], seed=i, max_tokens=20) for i in range(30)]
    responses = in_vllm(_generate, model, asked)
    filler = [token for r in responses for token in r.token_ids if token > 45]
    assert filler, "some sampled ids must be ones that text cannot carry"
    assert all(isinstance(token, int) for r in responses for token in r.token_ids)


def test_requests_that_do_not_fit_are_refused_with_the_numbers(model):
    empty, long = in_vllm(_refusals, model)
    assert "request 0: 0 prompt tokens" in empty
    assert "90 prompt tokens + 8 response tokens" in long and "at most 96" in long


def _refusals(directory: Path) -> list[str]:
    messages = []
    for prompt, tokens in (([], 4), ([5] * 90, 8)):
        with pytest.raises(ValueError) as caught:
            generator(directory).generate([Request(prompt, seed=0, max_tokens=tokens)])
        messages.append(str(caught.value))
    return messages


def test_bad_model_files_are_refused_by_name(model, tmp_path):
    truncated = copy_with_new_weights(model, tmp_path / "truncated", seed=3)
    content = (truncated / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(content[: len(content) // 2])
    empty = copy_with_new_weights(model, tmp_path / "empty", seed=3)
    (empty / "model.safetensors").unlink()
    endless = copy_with_new_weights(model, tmp_path / "endless", seed=3)
    for name in ("config.json", "generation_config.json"):
        text = (endless / name).read_text().replace('"eos_token_id": 2', '"eos_token_id": null')
        (endless / name).write_text(text)
    messages = in_vllm(_load_errors, model, [truncated, empty, _without(model, tmp_path, "model.norm.weight"), endless])
    assert "model.safetensors" in messages[0] and "copy it again" in messages[0]
    assert "no *.safetensors" in messages[1]
    assert "1 parameters are not in its files, first model.norm.weight" in messages[2]
    assert "eos_token_id" in messages[3]


def _without(source: Path, tmp_path: Path, tensor: str) -> Path:
    from safetensors.torch import load_file, save_file

    target = copy_with_new_weights(source, tmp_path / "partial", seed=3)
    weights = load_file(target / "model.safetensors")
    del weights[tensor]
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _load_errors(directory: Path, others: list[Path]) -> list[str]:
    engine, messages = generator(directory), []
    for other in others:
        with pytest.raises(ModelError) as caught:
            engine.load(other)
        messages.append(str(caught.value))
    return messages


def test_a_cache_that_holds_no_sequence_is_refused_before_anything_runs(model):
    message = in_vllm(_too_small, model)
    assert "kv_cache_bytes=1024" in message and "rollout" in message


def _too_small(directory: Path) -> str:
    from engine.backends.vllm.generator import Generator
    from engine.backends.vllm.requests import GeneratorConfig
    from engine.errors import SpecError
    from engine.layout import GenerationLayout

    with pytest.raises(SpecError) as caught:
        Generator(directory, GenerationLayout(), GeneratorConfig(max_model_len=96, kv_cache_bytes=1024))
    return str(caught.value)


def test_more_prompt_tokens_than_one_step_takes_change_nothing(model):
    """64 prompts of 80 tokens are more than the 4,096 of a step; the two alone are the first and the last."""
    rng = random.Random(0)
    asked = [Request([rng.randrange(3, 60) for _ in range(80)], seed=i, max_tokens=4) for i in range(64)]
    together = in_vllm(_tokens, model, asked, 64)
    assert in_vllm(_tokens, model, [asked[0], asked[-1]], 1) == [together[0], together[-1]]
