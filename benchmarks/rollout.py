"""A rollout through the engine against calling vLLM by hand: same process, same engine, same requests, alternating.

    .venv/engine/bin/python benchmarks/rollout.py [--model smollm2] [--prompts 16] [--group 8] [--tokens 32]

The engine's time covers everything from prompts to this rank's rows: dealing, seeds, vLLM, exchange, batch, shard. By
hand is `LLM.generate` on ready token ids, with vLLM's own defaults for compiling its sampler where there is a C++
compiler, and nothing made of its answer. Last line: one JSON object.
"""

import argparse
import json
import random
import shutil
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from engine.backends.vllm.requests import GeneratorConfig, Request  # noqa: E402
from engine.layout import GenerationLayout, read_model_shape  # noqa: E402
from engine.prompts import Prompt  # noqa: E402
from engine.ranks import join_ranks  # noqa: E402
from engine.workers.rollout import Replicas, Rollout, RolloutPlan, sample_seed  # noqa: E402
from examples.models import make  # noqa: E402

PROMPT_TOKENS = (24, 96)


def make_prompts(count: int, vocab_size: int) -> list[Prompt]:
    """Random token ids of random lengths."""
    rng = random.Random(0)
    return [Prompt(id=str(p), text="", token_ids=tuple(
        rng.randrange(3, vocab_size) for _ in range(rng.randint(*PROMPT_TOKENS)))) for p in range(count)]


class ByHand:
    """What a script around vLLM would do for the same samples."""

    def __init__(self, generator, prompts: list[Prompt], options: argparse.Namespace):
        requests = [Request(prompts[i // options.group].token_ids, sample_seed(0, 0, i), options.tokens)
                    for i in range(len(prompts) * options.group)]
        self.llm = generator.llm
        self.prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]
        self.params = [generator.sampling_params(request) for request in requests]
        self.compiles = shutil.which("g++") is not None

    def __call__(self) -> list[list[int]]:
        with nullcontext() if self.compiles else torch.compiler.set_stance("force_eager"):
            outputs = self.llm.generate(self.prompts, self.params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def measure(options: argparse.Namespace) -> dict:
    """Seconds of both ways, round by round."""
    from engine.backends.vllm.generator import Generator

    model = ROOT / ".ratchet" / "models" / options.model
    make(options.model, model)
    join_ranks()
    generator = Generator(model, GenerationLayout(), GeneratorConfig(
        max_model_len=PROMPT_TOKENS[1] + options.tokens, max_concurrent_sequences=options.concurrent))
    generator.load(model)
    prompts = make_prompts(options.prompts, read_model_shape(model).vocab_size)
    rollout = Rollout(generator.generate, Replicas(GenerationLayout()), RolloutPlan(
        samples_per_prompt=options.group, max_response_tokens=options.tokens, temperature=1.0, seed=0, minibatches=1,
        dp=1, dp_rank=0))
    by_hand = ByHand(generator, prompts, options)
    seconds, cpu_seconds = {"engine": [], "vllm": []}, {"engine": [], "vllm": []}
    for round_ in range(options.rounds + 1):
        for way in ("engine", "vllm") if round_ % 2 else ("vllm", "engine"):
            # Neither way may live off the prefixes that the other one cached.
            generator.weights_changed()
            begin, cpu_begin = time.perf_counter(), time.process_time()
            made = rollout.generate(prompts, iteration=0, policy_version=0) if way == "engine" else by_hand()
            if round_:
                seconds[way].append(time.perf_counter() - begin)
                cpu_seconds[way].append(time.process_time() - cpu_begin)
            if way == "engine":
                batch = made
            else:
                tokens = made
        check_equal(batch, tokens)
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "tokens": sum(map(len, tokens)),
            "compiled_by_hand": by_hand.compiles}


def check_equal(batch, tokens: list[list[int]]) -> None:
    """The comparison is of the same work: equal samples."""
    for row, sample_id in enumerate(batch["sample_ids"].tolist()):
        start, length = int(batch["prompt_lengths"][row]), int(batch["response_lengths"][row])
        assert batch["input_ids"][row, start : start + length].tolist() == tokens[sample_id], f"sample {sample_id}"


def report(measured: dict) -> None:
    """Table for people, JSON for machines."""
    medians = {way: statistics.median(values) for way, values in measured["seconds"].items()}
    print(f"{'':8} {'median s':>9} {'tokens/s':>9}   rounds")
    for way, values in measured["seconds"].items():
        rounds = " ".join(f"{value:.3f}" for value in values)
        print(f"{way:8} {medians[way]:9.3f} {measured['tokens'] / medians[way]:9.0f}   {rounds}")
    cpu = {way: statistics.median(values) for way, values in measured["cpu_seconds"].items()}
    print(f"CPU seconds of the process, which a busy machine disturbs less: {cpu['engine']:.3f} and {cpu['vllm']:.3f}")
    print(json.dumps({
        "rollout_over_vllm": medians["engine"] / medians["vllm"], "cpu_over_vllm": cpu["engine"] / cpu["vllm"],
        "engine_s": medians["engine"], "vllm_s": medians["vllm"],
        "tokens_per_s": measured["tokens"] / medians["engine"],
        "compiled_by_hand": measured["compiled_by_hand"], "threads": torch.get_num_threads()}))


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="one of examples/models.py")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8, help="samples of each prompt")
    parser.add_argument("--tokens", type=int, default=32, help="of the longest response")
    parser.add_argument("--concurrent", type=int, default=64, help="sequences decoded at once")
    parser.add_argument("--rounds", type=int, default=9)
    report(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
