"""The evaluate stage on two tiny models: against transformers, in any batch, order and cache, on any replicas."""

import json
import re
import shutil
from pathlib import Path

import pytest

from engine.errors import RefusedError
from engine.job import Job
from engine.spec import EvaluateSpec, RunResult, parse_spec
from engine.spec.evaluation import Evaluation, SampleRecord
from tests.engine.multiprocess import run_ranks
from tests.engine.tiny_models import classifier_scores, copy_with_new_weights, make_reward_model, make_tiny_model
from tests.engine.vllm_process import in_vllm

FIRST_DIGIT = {"kind": "exact", "pattern": r"(?s)\D*(\d).*"}
"""A random model gets it right about once in ten; a response without a digit is a format error."""


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Models `base` and `other`, prepared prompts of two tasks."""
    root = tmp_path_factory.mktemp("evaluate")
    make_tiny_model(root / "base", "llama", tie_word_embeddings=True)
    copy_with_new_weights(root / "base", root / "other", seed=1)
    prepare_prompts(root, tokenizer=root / "base")
    return root


def prepare_prompts(root: Path, tokenizer: Path, train: int = 1) -> None:
    """Write `prompts/` with 24 held-out prompts and `train` others."""
    from engine.prepare import run

    texts = {f"{a}+{b}*{a}": str(b) for a in range(1, 7) for b in range(4)}
    rows = [{"prompt": text, "answer": answer, "task": ("plus", "times")[i % 2]}
            for i, (text, answer) in enumerate(texts.items())]
    (root / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [{"prompt": f"{a}-{a % 7}", "answer": "1"} for a in range(train)]
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job_dir = root / "prepare_job"
    job_dir.mkdir()
    sets = {split: {"sources": [{"kind": "file", "uri": str(root / f"{split}.jsonl")}]} for split in ("train", "eval")}
    run(Job(job_dir), parse_spec({
        "stage": "prepare", "tokenizer": str(tokenizer), "output": str(root / "prompts"), "max_prompt_tokens": 32,
        **sets}))


def spec_of(world: Path, *names: str, **fields) -> EvaluateSpec:
    return parse_spec({
        "stage": "evaluate", "models": [{"name": name, "uri": str(world / name)} for name in names],
        "prompts": str(world / "prompts"), "rewards": [FIRST_DIGIT], "max_response_tokens": 12,
        "samples_per_prompt": 3, "kv_cache_bytes": 16 << 20, "max_concurrent_sequences": 16, **fields})


def evaluate(spec: EvaluateSpec, job_dir: Path) -> tuple[RunResult, Evaluation, list[SampleRecord]]:
    """Run the stage in this process."""
    from engine.evaluate import run

    job_dir.mkdir(parents=True, exist_ok=True)
    return read(run(Job(job_dir), spec))


def read(result: RunResult) -> tuple[RunResult, Evaluation, list[SampleRecord]]:
    evaluation = Evaluation.model_validate_json(Path(result.outputs["evaluation"]).read_text())
    lines = Path(result.outputs["samples"]).read_text().splitlines()
    return result, evaluation, [SampleRecord.model_validate_json(line) for line in lines]


@pytest.fixture(scope="module")
def both(world) -> tuple[RunResult, Evaluation, list[SampleRecord]]:
    return in_vllm(evaluate, spec_of(world, "base", "other"), world / "both")


def test_greedy_responses_and_all_numbers_are_those_of_a_slow_loop(world, both):
    result, evaluation, samples = both
    for name in ("base", "other"):
        expected = in_vllm(_greedy_with_transformers, world / name, [s.prompt for s in samples if s.greedy][:24])
        ours = [s for s in samples if s.model == name]
        greedy, sampled = [s for s in ours if s.greedy], [s for s in ours if not s.greedy]
        assert [s.response for s in greedy] == expected
        digits = [re.search(r"\d", s.response) for s in ours]
        assert [s.score for s in ours] == [float(d is not None and d[0] == s.answer)
                                           for d, s in zip(digits, ours, strict=True)]
        metrics = {k.removeprefix(f"{name}/"): v for k, v in result.metrics.items() if k.startswith(f"{name}/")}
        assert metrics["greedy_reward"] == pytest.approx(sum(s.score for s in greedy) / 24)
        assert metrics["mean_reward"] == metrics["pass_at_1"] == pytest.approx(sum(s.score for s in sampled) / 72)
        assert metrics["mean_reward_low"] <= metrics["mean_reward"] <= metrics["mean_reward_high"]
        assert metrics["response_tokens"] == pytest.approx(sum(s.tokens for s in ours) / 96)
        assert metrics["format_error_share"] == pytest.approx(digits.count(None) / 96)
        assert metrics["task/plus/mean_reward"] == pytest.approx(
            sum(s.score for s in sampled if s.task == "plus") / 36)
        cut = [s for s in ours if s.tokens == 12]
        assert 0 < metrics["truncated_share"] <= len(cut) / 96
    scores = {m.model: [p.sampled for p in m.prompts] for m in evaluation.models}
    assert scores["base"] != scores["other"]
    assert [p.id for p in evaluation.of("base").prompts] == [p.id for p in evaluation.of("other").prompts]
    assert result.hashes["weights/base"] != result.hashes["weights/other"]


def _greedy_with_transformers(directory: Path, questions: list[str]) -> list[str]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory).eval(), AutoTokenizer.from_pretrained(directory)
    texts = []
    for question in questions:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False)
        with torch.no_grad():
            out = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), do_sample=False,
                                 max_new_tokens=12)[0, len(ids):].tolist()
        texts.append(tokenizer.decode(out[: out.index(2)] if 2 in out else out))
    return texts


def test_a_reward_model_adds_to_the_other_rewards(world, both, tmp_path):
    from transformers import AutoTokenizer

    judge = make_reward_model(world / "other", tmp_path / "reward_model")
    spec = spec_of(world, "base", rewards=[FIRST_DIGIT, {"kind": "reward_model", "model": str(judge), "weight": 2}])
    _, _, samples = in_vllm(evaluate, spec, tmp_path / "job")
    tokenizer = AutoTokenizer.from_pretrained(world / "base")
    sequences = []
    for sample in samples:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": sample.prompt}], add_generation_prompt=True, return_dict=False)
        # One token a character or name; the end token, which the text lacks, is the rest.
        ids = tokenizer.convert_tokens_to_ids(re.findall(r"<\w+>|.", sample.response))
        sequences.append(prompt + ids + [2] * (sample.tokens - len(ids)))
    without = {(s.id, s.response): s.score for s in both[2] if s.model == "base"}
    expected = [without[s.id, s.response] + 2 * score
                for s, score in zip(samples, classifier_scores(judge, sequences), strict=True)]
    assert [s.score for s in samples] == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_the_scores_of_a_model_do_not_depend_on_batch_size_order_or_company(world, both, tmp_path):
    """FAULTS 23."""
    _, expected, samples = both
    for concurrent in (1, 3):
        result, evaluation, again = in_vllm(
            evaluate, spec_of(world, "base", max_concurrent_sequences=concurrent), tmp_path / str(concurrent))
        assert evaluation.of("base") == expected.of("base")
        assert again == [s for s in samples if s.model == "base"]
    _, evaluation, _ = in_vllm(evaluate, spec_of(world, "other", "base"), tmp_path / "order")
    assert evaluation.of("base") == expected.of("base")
    assert evaluation.of("other") == expected.of("other")
    _, evaluation, _ = in_vllm(evaluate, spec_of(world, "other", max_prompts=5), tmp_path / "few")
    assert evaluation.of("other").prompts == expected.of("other").prompts[:5]


def test_a_cached_model_is_not_generated_again_whatever_it_is_called(world, both, tmp_path):
    cache = str(tmp_path / "cache")
    first, _, _ = in_vllm(evaluate, spec_of(world, "base", cache=cache), tmp_path / "first")
    assert "generate/base" in first.timings_s
    shutil.copytree(world / "base", tmp_path / "champion")
    uris = {"candidate": world / "other", "champion": tmp_path / "champion"}
    models = [{"name": name, "uri": str(uri)} for name, uri in uris.items()]
    result, evaluation, samples = in_vllm(
        evaluate, spec_of(world, "base", cache=cache, models=models, max_concurrent_sequences=5), tmp_path / "second")
    assert {"generate/candidate", "generate/champion"} & set(result.timings_s) == {"generate/candidate"}
    champion = evaluation.of("champion")
    assert champion.uri == str(tmp_path / "champion")
    assert champion.prompts == both[1].of("base").prompts
    assert {s.model for s in samples} == {"candidate", "champion"}
    assert [s.response for s in samples if s.model == "champion"] == [
        s.response for s in both[2] if s.model == "base"]
    third, _, _ = in_vllm(evaluate, spec_of(world, "base", "other", cache=cache), tmp_path / "third")
    assert "start_vllm" not in third.timings_s


@pytest.mark.parametrize("change", [
    {"temperature": 0.5}, {"seed": 1}, {"max_response_tokens": 11}, {"samples_per_prompt": 2}, {"pass_threshold": 0.5},
    {"rewards": [{**FIRST_DIGIT, "format_score": 0.25}]}])
def test_whatever_changes_a_score_is_part_of_the_cache_key(world, change):
    from engine.evaluate import settings_hash

    assert settings_hash(spec_of(world, "base", **change)) != settings_hash(spec_of(world, "base"))


def test_what_changes_no_score_is_not_part_of_the_cache_key(world):
    from engine.evaluate import settings_hash

    other = spec_of(world, "other", world_size=2, max_concurrent_sequences=1, kv_cache_bytes=1 << 25, cache="x")
    assert settings_hash(other) == settings_hash(spec_of(world, "base"))


def test_a_torn_cache_entry_is_made_again(world, both, tmp_path):
    cache = tmp_path / "cache"
    in_vllm(evaluate, spec_of(world, "base", cache=str(cache)), tmp_path / "first")
    (entry,) = cache.iterdir()
    content = (entry / "evaluation.json").read_text()
    (entry / "evaluation.json").write_text(content[: len(content) // 2])
    result, evaluation, _ = in_vllm(evaluate, spec_of(world, "base", cache=str(cache)), tmp_path / "second")
    assert "generate/base" in result.timings_s
    assert evaluation.of("base") == both[1].of("base")
    assert (entry / "evaluation.json").read_text() == content


def test_models_that_one_engine_cannot_hold_are_refused_by_name(world, tmp_path):
    make_tiny_model(world / "deeper", "llama", tie_word_embeddings=True, num_hidden_layers=3)
    renamed = copy_with_new_weights(world / "base", world / "renamed", seed=0)
    text = (renamed / "tokenizer.json").read_text().replace('"<r50>"', '"<s50>"')
    (renamed / "tokenizer.json").write_text(text)
    make_tiny_model(world / "narrow", "llama", vocab_size=12)
    refusals = [
        (spec_of(world, "base", "deeper"), "num_hidden_layers = 3, model base has 2"),
        (spec_of(world, "base", "renamed"), "its vocabulary is not that of model base"),
        (spec_of(world, "narrow"), "vocabulary of 12"),
        (spec_of(world, "base", layout={"tp": 3}, world_size=3), "tp=3 does not divide 4 attention heads"),
        (spec_of(world, "missing"), "config.json"),
    ]
    for index, (spec, said) in enumerate(refusals):
        message = in_vllm(_refusal, spec, tmp_path / str(index))
        assert said in message
        assert not (tmp_path / str(index) / "evaluation.json").exists()


def _refusal(spec: EvaluateSpec, job_dir: Path) -> str:
    with pytest.raises(RefusedError) as caught:
        evaluate(spec, job_dir)
    return str(caught.value)


@pytest.mark.slow
def test_replicas_share_the_prompts_and_rank_0_writes_what_one_would(world, both, tmp_path):
    tmp_path = tmp_path / "job"
    for tp in (1, 2):
        spec = spec_of(world, "base", "other", world_size=2, layout={"tp": tp}, cache=str(tmp_path / f"cache{tp}"))
        results = run_ranks(_evaluate_rank, 2, spec, tmp_path / str(tp), timeout_s=400)
        assert results[1] == {}
        _, evaluation, samples = read(RunResult.model_validate(results[0]))
        assert evaluation.models == both[1].models
        assert samples == both[2]


def _evaluate_rank(spec: EvaluateSpec, job_dir: Path) -> dict:
    import os

    from engine.evaluate import run

    rank = int(os.environ["RANK"])
    job_dir.mkdir(parents=True, exist_ok=True)
    result = run(Job(job_dir, rank), spec)
    return result.model_dump() if rank == 0 else result.outputs
