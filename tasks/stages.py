"""From a pipeline and the results so far to the spec of the next job, and to the decision to go on. Pure functions."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import SpecError
from engine.spec import EvaluateSpec, FinetuneSpec, PrepareSpec, ReportSpec, RunResult, TrackingSpec, TrainSpec
from engine.spec.algorithm import ALGORITHMS, ActorCritic
from tasks.pipeline import FINETUNED, TRAINED, Pipeline, build, merge, parse_pipeline


@dataclass(frozen=True)
class Form:
    """What a person may fill in in Airflow; None keeps the preset's value."""

    stages: int | None = None
    iterations: int | None = None
    seed: int | None = None
    lr: float | None = None
    model: str | None = None
    start_from: str | None = None
    approval: str | None = None
    algorithm: str | None = None
    """Another kind than the preset's comes with the settings of its paper."""

    def change(self) -> dict[str, Any]:
        """The form as a change to a preset."""
        fields = {
            ("stages", "count"): self.stages, ("train", "iterations"): self.iterations, ("train", "seed"): self.seed,
            ("train", "actor", "lr"): self.lr, ("model",): self.model, ("start_from",): self.start_from,
            ("gate", "approval"): self.approval}
        change: dict[str, Any] = {}
        for path, value in fields.items():
            leaf: Any = value
            for key in reversed(path):
                leaf = {key: leaf}
            change = merge(change, leaf) if value is not None else change
        return change


def resolve(preset: dict[str, Any], form: Form, override: dict[str, Any]) -> Pipeline:
    """Preset, then the form, then the YAML override; the whole checked.

    Raises:
        SpecError: names each wrong field, its value, and what it must be.
    """
    filled = merge(preset, form.change())
    if form.algorithm is not None:
        filled = merge(filled, {"train": algorithm_change(filled.get("train"), form.algorithm)})
    return parse_pipeline(merge(filled, override))


def algorithm_change(train: Any, kind: str) -> dict[str, Any]:
    """What changes in section `train` when a person chooses an algorithm; nothing when it is the one that is there.

    A critic that the new one does not train goes; one that it needs and that is not there learns at the actor's rate.
    """
    if not isinstance(train, dict) or kind not in ALGORITHMS or (train.get("algorithm") or {}).get("kind") == kind:
        return {}
    change: dict[str, Any] = {"algorithm": {"kind": kind}}
    if not issubclass(ALGORITHMS[kind], ActorCritic):
        return change | {"critic": None}
    return change if train.get("critic") else change | {"critic": {"lr": (train.get("actor") or {}).get("lr")}}


@dataclass(frozen=True)
class Run:
    """One run of a pipeline, as far as its jobs can see."""

    pipeline: Pipeline
    root: str
    """Where the run keeps its files: below RATCHET_STORE."""
    evaluations: str
    """The cache of evaluations, shared by all runs."""
    base_model: str
    """URI of the model that training starts from."""
    results: Mapping[str, RunResult]
    """By task id."""
    tracking: TrackingSpec = TrackingSpec()


def prepare_spec(run: Run) -> PrepareSpec:
    """The job that freezes prompts, demonstrations and pairs."""
    return build(PrepareSpec, {
        **run.pipeline.prepare, "tokenizer": run.base_model, "output": prompts_uri(run.root)})


def finetune_spec(run: Run, section: str) -> FinetuneSpec:
    """The job of a section of the finetune stage: the first from the base model, the others from the fine-tuned one."""
    kinds = FINETUNED[section]
    return build(FinetuneSpec, {
        "objective": {"kind": kinds[0]}, **getattr(run.pipeline, section),
        "model": run.base_model if section == "sft" else trained_before(run, ("sft",)),
        "prompts": output(run, "prepare", "prompts"), "checkpoint_dir": f"{run.root}/{section}/checkpoints",
        "export_dir": export_uri(run.root, section), "tracking": run.tracking.model_dump()})


def trained_before(run: Run, sections: tuple[str, ...]) -> str:
    """What the first of these sections that the pipeline has exports; the base model when it has none."""
    return next((export_uri(run.root, name) for name in sections if name in run.pipeline.finetuned), run.base_model)


def train_spec(run: Run, stage: int) -> TrainSpec:
    """The training job of a stage, counted from 1; it goes on from the checkpoint of the stage before.

    Every stage has the model that the first one started from: it is the reference.
    """
    section = dict(run.pipeline.train)
    numbers = run.pipeline.train_numbers
    # One schedule over all stages: the engine sees one stage only.
    steps = numbers.iterations * numbers.epochs * numbers.minibatches * run.pipeline.stages.count
    for role, optimizer in (("actor", numbers.actor), ("critic", numbers.critic)):
        if optimizer is not None and optimizer.schedule != "constant" and optimizer.decay_steps is None:
            section[role] = {**section[role], "decay_steps": steps}
    resume_from = None
    if stage > 1:
        resume_from = output(run, train_task(stage - 1), "checkpoint")
    return build(TrainSpec, {
        **with_trained_reward(section, run.root), "model": trained_before(run, ("dpo", "sft")),
        "prompts": output(run, "prepare", "prompts"), "resume_from": resume_from,
        "checkpoint_dir": f"{run.root}/{stage_name(stage)}/checkpoints",
        "export_dir": export_uri(run.root, stage_name(stage)), "tracking": run.tracking.model_dump()})


def evaluate_spec(run: Run, stage: int) -> EvaluateSpec:
    """The evaluation of a stage's model beside the model it started from."""
    models = {"base": run.base_model, stage_name(stage): output(run, train_task(stage), "export")}
    return comparison_spec(run, models, prompts=output(run, "prepare", "prompts"))


def comparison_spec(run: Run, models: Mapping[str, str], *, prompts: str) -> EvaluateSpec:
    """An evaluation of some models (name -> URI) with the pipeline's settings, so that it shares the cache."""
    return build(EvaluateSpec, {
        **with_trained_reward(run.pipeline.evaluate, run.root), "prompts": prompts, "cache": run.evaluations,
        "models": [{"name": name, "uri": uri} for name, uri in models.items()], "tracking": run.tracking.model_dump()})


def with_trained_reward(section: dict[str, Any], root: str) -> dict[str, Any]:
    """A section whose rewards (and costs) name the reward model that the run trains by where it is."""
    own = {"kind": "reward_model", "model": TRAINED}

    def placed(rewards: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**reward, "model": export_uri(root, "reward_model")} if own.items() <= reward.items() else reward
                for reward in rewards]

    section = {**section, "rewards": placed(section["rewards"])}
    algorithm = section.get("algorithm", {})
    return section | ({"algorithm": {**algorithm, "costs": placed(algorithm["costs"])}} if "costs" in algorithm else {})


def report_spec(run: Run, jobs: Mapping[str, str], facts: Mapping[str, str],
                gpu_hour_price: float | None = None) -> ReportSpec:
    """The report of a run: curves of all stages, the base model beside the last stage's.

    Args:
        run: with the results of all stages that ran.
        jobs: job directories by task id.
        facts: shown at the top.
        gpu_hour_price: for the costs; None: none are shown.
    """
    last = last_stage(run.pipeline, evaluations_of(run.results))
    numbers = run.pipeline.train_numbers
    trained = [train_task(k) for k in range(1, last + 1)]
    everything = [task for k in range(1, last + 1) for task in (train_task(k), evaluate_task(k))]
    evaluation = evaluate_task(last)
    return build(ReportSpec, {
        "title": f"{run.pipeline.registry.model}: {numbers.algorithm.kind}, {last} stage{'s' if last > 1 else ''}",
        "metrics": [f"{jobs[task]}/metrics.jsonl" for task in trained],
        "results": [f"{jobs[task]}/result.json" for task in ("prepare", *run.pipeline.finetuned, *everything)],
        "evaluation": output(run, evaluation, "evaluation"), "samples": output(run, evaluation, "samples"),
        "before": "base", "after": stage_name(last), "output": f"{run.root}/report", "gpu_hour_price": gpu_hour_price,
        "facts": {"model": run.base_model, "seed": str(numbers.seed), **facts}, "tracking": run.tracking.model_dump()})


@dataclass(frozen=True)
class Decision:
    """Whether another stage is worth it."""

    go_on: bool
    reason: str


def decide(pipeline: Pipeline, stage: int, evaluations: Mapping[int, Mapping[str, float]]) -> Decision:
    """Whether to train another stage after `stage`.

    Args:
        pipeline: its `stages` rule decides.
        stage: the one just evaluated, from 1.
        evaluations: metrics by stage number, 0 is the base model.
    Raises:
        SpecError: the evaluation has no metric of the rule's name.
    """
    rule = pipeline.stages
    if stage >= rule.count:
        return Decision(False, f"stage {stage} was the last of {rule.count}")
    now = _metric(evaluations, stage, rule.metric)
    if math.isnan(now):
        return Decision(False, f"{rule.metric} is NaN after stage {stage}")
    if rule.target is not None and now >= rule.target:
        return Decision(False, f"{rule.metric} {now:.4g} reached the target {rule.target:.4g} after stage {stage}")
    if rule.min_improvement is not None:
        before = _metric(evaluations, stage - 1, rule.metric)
        if now - before < rule.min_improvement:
            return Decision(False, f"stage {stage} changed {rule.metric} by {now - before:+.4g} (from {before:.4g}), "
                                   f"less than {rule.min_improvement:.4g}")
    return Decision(True, f"{rule.metric} is {now:.4g} after stage {stage} of {rule.count}")


def last_stage(pipeline: Pipeline, evaluations: Mapping[int, Mapping[str, float]]) -> int:
    """The stage whose model is the candidate: the last that ran, found by the same decisions that ended the run.

    The last and not the best: choosing the best of several on the prompts that the gate tests on would flatter it.
    """
    stage = 1
    while decide(pipeline, stage, evaluations).go_on:
        stage += 1
    return stage


def evaluations_of(results: Mapping[str, RunResult]) -> dict[int, dict[str, float]]:
    """Metrics by stage (0: the base model) from the results of the evaluation tasks.

    An evaluation's metrics are named `<model>/<metric>`.
    """
    found: dict[int, dict[str, float]] = {}
    for task, result in results.items():
        if not task.endswith(".evaluate"):
            continue
        stage = int(task.split(".")[0].removeprefix("stage_"))
        for name, value in result.metrics.items():
            model, _, metric = name.partition("/")
            found.setdefault(0 if model == "base" else stage, {})[metric] = value
    return found


def stage_name(stage: int) -> str:
    """Name of a stage: its task group, its MLflow run, its model in an evaluation."""
    return f"stage_{stage}"


def train_task(stage: int) -> str:
    """Task id of a stage's training."""
    return f"{stage_name(stage)}.train"


def evaluate_task(stage: int) -> str:
    """Task id of a stage's evaluation."""
    return f"{stage_name(stage)}.evaluate"


def export_uri(root: str, name: str) -> str:
    """Where the model of a stage or section goes."""
    return f"{root}/{name}/export"


def prompts_uri(root: str) -> str:
    """Where a run's prompts go."""
    return f"{root}/prompts"


def output(run: Run, task: str, name: str) -> str:
    """A URI that an earlier job returned.

    Raises:
        SpecError: the task has no result, or its result no such output.
    """
    result = run.results.get(task)
    if result is None:
        raise SpecError(f"task {task} has no result; clear it so that it runs again")
    if name not in result.outputs:
        raise SpecError(f"the result of task {task} has no output {name!r}; it has {sorted(result.outputs)}")
    return result.outputs[name]


def absolute_uri(uri: str, below: str) -> str:
    """`uri` as a URI that does not depend on the working directory: a relative path is below `below`."""
    return uri if "://" in uri else os.path.normpath(os.path.join(below, os.path.expanduser(uri)))


def _metric(evaluations: Mapping[int, Mapping[str, float]], stage: int, name: str) -> float:
    metrics = evaluations.get(stage, {})
    if name not in metrics:
        raise SpecError(f"stages.metric: stage {stage} has no {name!r}; it has {sorted(metrics)[:20]}")
    return metrics[name]
