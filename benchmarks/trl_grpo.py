"""TRL's GRPO on a job written by benchmarks/iteration.py; runs in .venv/trl: `trl_grpo.py JOB.json`.

Same model, prompts, group size, lengths, optimizer steps and fp32 as the preset; TRL generates with transformers. The
first iteration (one generation and its optimizer steps) is dropped. Last line: one JSON object.
"""

import json
import os
import re
import statistics
import sys
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback


class Clock(TrainerCallback):
    """Notes when each iteration ends."""

    def __init__(self, steps_per_iteration: int):
        self.steps, self.times = steps_per_iteration, []

    def on_train_begin(self, args, state, control, **kwargs):
        """Start."""
        self.times.append(time.monotonic())

    def on_step_end(self, args, state, control, **kwargs):
        """One optimizer step."""
        if state.global_step % self.steps == 0:
            self.times.append(time.monotonic())


def main() -> None:
    """Train and report."""
    job = json.loads(Path(sys.argv[1]).read_text())
    train = job["train"]
    algorithm, optimizer = train["algorithm"], train["actor"]
    samples = train["prompts_per_iteration"] * algorithm["samples_per_prompt"]
    minibatches = train["minibatches"]
    pattern = re.compile(train["rewards"][0]["pattern"])

    def reward(completions, answer, **kwargs):
        found = [pattern.fullmatch(completion[0]["content"]) for completion in completions]
        return [0.0 if match is None else 1.0 if match[1] == right else 0.1
                for match, right in zip(found, answer, strict=True)]

    clock = Clock(minibatches)
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(train["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(train["model"]),
        reward_funcs=reward,
        train_dataset=Dataset.from_list(job["prompts"]),
        callbacks=[clock],
        args=trl.GRPOConfig(
            output_dir=job["output"], use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[],
            save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=train["seed"],
            learning_rate=optimizer["lr"], max_grad_norm=optimizer["max_grad_norm"], lr_scheduler_type="constant",
            per_device_train_batch_size=samples // minibatches, gradient_accumulation_steps=1,
            steps_per_generation=minibatches, max_steps=train["iterations"] * minibatches,
            num_generations=algorithm["samples_per_prompt"], temperature=1.0, top_k=0, beta=0.0, loss_type="dapo",
            max_completion_length=train["rollout"]["max_response_tokens"]),
    )
    trainer.train()
    seconds = [after - before for before, after in zip(clock.times[1:], clock.times[2:], strict=False)]
    iteration = statistics.median(seconds)
    print(json.dumps({"version": trl.__version__, "iteration_s": iteration, "samples_per_s": samples / iteration}))


if __name__ == "__main__":
    main()
