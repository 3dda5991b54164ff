"""The finetune stage: supervised fine-tuning, reward models and DPO on the trainer of the train stage."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from engine.backends.megatron.heads import LogprobHead, OutputFn, score_head
from engine.backends.megatron.parallel import World, start_world
from engine.backends.megatron.trainer import Model, TrainedModel, load_network
from engine.batch import Sample, balance, make_batch
from engine.dataflows.finetuning import PairObjective, SFTObjective
from engine.errors import DataError
from engine.job import Job
from engine.layout import check_layout, read_model_shape
from engine.model_files import local_model
from engine.prompts import Prompt, PromptCursor, PromptSet
from engine.ranks import join_ranks
from engine.resharding.export import export_hf
from engine.resharding.megatron import MegatronSharding, RewardModelSharding
from engine.spec.finetune import SFT, FinetuneSpec, RewardModelling
from engine.spec.job import RunResult
from engine.stage import Metrics, Stage
from engine.tracking import DatasetInput
from engine.workers.minibatches import Update
from engine.workers.reference import Reference


def run(job: Job, spec: FinetuneSpec) -> RunResult:
    """Train `spec.iterations` optimizer steps and export the model.

    Raises:
        RefusedError: model, rows or layout cannot work.
        NumericsError: three steps in a row whose loss or gradient was not finite.
    """
    join_ranks()
    model_dir = local_model(spec.model, job.dir / "model", job.rank)
    check_layout(read_model_shape(model_dir), spec.layout)
    rows, held_out = (PromptSet.open(spec.prompts, name) for name in (spec.data, f"{spec.data}_eval"))
    if min(len(held_out), spec.max_eval_rows or len(held_out)) < spec.layout.dp:
        raise DataError(f"prompts {spec.prompts}: fewer rows of {spec.data}_eval are measured than layout.dp = "
                        f"{spec.layout.dp}; give more, or raise max_eval_rows")
    world = start_world(spec.layout, spec.seed)
    stage = Stage(job, spec, world, FinetuneLearner(spec, model_dir, world, (rows, held_out)))
    job.event("ready", layout=str(spec.layout))
    return stage.run(DatasetInput(name=spec.data, digest=rows.sha256, source=spec.prompts))


class FinetuneLearner:
    """Optimizer steps of one objective on one model."""

    def __init__(self, spec: FinetuneSpec, model_dir: Path, world: World, data: tuple[PromptSet, PromptSet]):
        """Args: model_dir: of `spec.model`, on this machine; data: rows that are trained on, and that are measured."""
        self.spec, self.model_dir, self.world = spec, model_dir, world
        rows, held_out = data
        self.cursor = PromptCursor(rows, spec.seed)
        self.held_out = [held_out[row] for row in range(min(len(held_out), spec.max_eval_rows or len(held_out)))]
        kind = spec.objective.kind
        self.objective = SFTObjective(kind) if isinstance(spec.objective, SFT) else PairObjective(kind, spec.objective)
        self.scores = isinstance(spec.objective, RewardModelling)
        self.output_fn: OutputFn = score_head if self.scores else LogprobHead(with_greedy=kind == "sft")
        model = TrainedModel(
            world, self._network(), spec.microbatch_tokens, spec.optimizer,
            spec.optimizer.decay_steps or spec.iterations)
        self.models = {"model": model}
        self.reference = self._reference() if kind in ("dpo", "ipo") else None
        self.before: Metrics | None = None
        """Measured on the held-out set before the stage's first iteration."""

    def begin(self) -> Metrics:
        """Measure the held-out set, unless this stage did so before it was interrupted."""
        if self.before is None:
            self.before = self.evaluate()
        return self.before

    def iterate(self, iteration: int) -> Metrics:
        """One optimizer step on the next rows."""
        prompts = self.cursor.take(self.spec.rows_per_iteration)
        lengths = [len(prompt.token_ids) + sum(map(len, prompt.responses)) for prompt in prompts]
        self.tokens = sum(lengths)
        batch = self._batch(prompts, balance(lengths, self.world.dp_size)[self.world.dp_rank])
        update = Update(self.objective.role, self.objective, self.output_fn, self.objective.loss, epochs=1)
        metrics = update.run(self.models["model"], batch)
        every = self.spec.evaluate_every
        return metrics | self.evaluate() if every and (iteration + 1) % every == 0 else metrics

    def evaluate(self) -> Metrics:
        """Metrics `eval/*` of the model on the held-out rows: the loss that is trained, without a step."""
        batch = self._batch(self.held_out, range(self.world.dp_rank, len(self.held_out), self.world.dp_size))
        objective = replace(self.objective, role="eval")
        outputs = self.models["model"].forward(batch, self.output_fn)
        denominator = self._add_up(objective.denominator(batch))
        loss, sums = objective.loss(outputs, batch, denominator)
        names = list(sums)
        totals = self._add_up(torch.stack([loss.double(), *(sums[name].double() for name in names)]))
        return objective.metrics(dict(zip(("loss", *names), totals.tolist(), strict=True)))

    def measure(self, seconds: float) -> Metrics:
        """Time and throughput; prompts of pairs count once."""
        return {"time/iteration_s": seconds, "time/tokens_per_s": self.tokens / seconds,
                "time/samples_per_s": self.spec.rows_per_iteration / seconds}

    def shown(self, metrics: Metrics) -> Metrics:
        """Loss, accuracy and speed."""
        role = self.objective.role
        names = {"loss": f"{role}/loss", "accuracy": f"{role}/accuracy", "iteration_s": "time/iteration_s"}
        return {short: metrics[name] for short, name in names.items() if name in metrics}

    def state(self) -> dict[str, Any]:
        """See `engine.stage.Learner`."""
        return {"cursor": self.cursor.state(), "before": self.before}

    def restore(self, state: dict[str, Any]) -> None:
        """See `engine.stage.Learner`."""
        self.cursor = PromptCursor.restore(self.cursor.prompts, state["cursor"])
        self.before = state["before"] if state["iteration"] > state["stage_start"] else None

    def summary(self) -> Metrics:
        """`eval/*` after the last iteration, and with `_before` those before the first."""
        return self.evaluate() | {f"{name}_before": value for name, value in (self.before or {}).items()}

    def export(self, target: Path) -> None:
        """The model; a reward model with its head."""
        shape = read_model_shape(self.model_dir)
        sharding = (RewardModelSharding if self.scores else MegatronSharding)(shape, self.spec.layout)
        export_hf(self.model_dir, target, sharding, self.models["model"].params())

    def _network(self) -> Any:
        return load_network(self.model_dir, self.world, "values" if self.scores else "logprobs",
                            sequence_parallel=self.spec.sequence_parallel)

    def _reference(self) -> Reference:
        network = self._network()
        network.requires_grad_(False)
        return Reference(Model(self.world, network, self.spec.microbatch_tokens), temperature=1.0)

    def _batch(self, prompts: Sequence[Prompt], mine: Sequence[int]) -> TensorDict:
        """The batch of this rank's share of `prompts`."""
        batch = response_rows(prompts, mine)
        return batch if self.reference is None else self.reference.logprobs(batch)

    def _add_up(self, values: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(values, group=self.world.groups.dp)
        return values


def response_rows(prompts: Sequence[Prompt], mine: Sequence[int]) -> TensorDict:
    """Rows with given responses, as `engine.batch` lays out sampled ones: one a response, a prompt's side by side.

    Args:
        prompts: with one response each, or with two, which become pairs.
        mine: which of them.
    """
    responses = len(prompts[0].responses)
    batch = make_batch([
        Sample(index * responses + place, prompts[index].token_ids, ids, [0.0] * len(ids), truncated=False)
        for index in mine for place, ids in enumerate(prompts[index].responses)], policy_version=0)
    if responses == 2:
        batch["pair_ids"] = batch["sample_ids"] // 2
    return batch
