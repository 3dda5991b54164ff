"""The train stage: iterations of an algorithm, checkpoints on the way, a Hugging Face directory at the end."""

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine import store
from engine.backends.megatron.parallel import World, start_world
from engine.checkpoint import CheckpointFiles, Checkpoints
from engine.checkpoint.files import name_of
from engine.checkpoint.mirror import Mirror
from engine.controller.build import Assembly, Builder
from engine.controller.phases import PhaseClock
from engine.dataflows import AlgorithmState, initial_state, iteration_for
from engine.errors import NumericsError, SpecError
from engine.job import Job
from engine.layout import ModelShape, check_generation_layout, check_layout, read_model_shape
from engine.model_files import local_model
from engine.prompts import PromptCursor, PromptSet
from engine.ranks import join_ranks
from engine.resharding.export import export_hf
from engine.resharding.megatron import MegatronSharding
from engine.spec.job import RunResult, hash_spec
from engine.spec.train import TrainSpec
from engine.tracking import DatasetInput, Tracker

MAX_ALARMS_IN_A_ROW = 3


def run(job: Job, spec: TrainSpec) -> RunResult:
    """Train `spec.iterations` iterations and export the policy.

    Raises:
        RefusedError: model, prompts or layout cannot work.
        NumericsError: three iterations in a row with NaN or infinity.
    """
    join_ranks()
    model_dir = local_model(spec.model, job.dir / "model", job.rank)
    shape = read_model_shape(model_dir)
    check_layout(shape, spec.layout)
    check_generation_layout(shape, spec.rollout.layout)
    prompts = PromptSet.open(spec.prompts, "train")
    world = start_world(spec.layout, spec.seed)
    clock = PhaseClock(on_enter=job.move)
    started = time.monotonic()
    assembly = Builder(spec, world, model_dir, shape).build(prompts, clock)
    stage = Stage(job, spec, world, assembly, clock)
    job.event("ready", seconds=round(time.monotonic() - started, 2), layout=str(spec.layout))
    try:
        if world.rank == 0:
            with Tracker(job.dir, spec.tracking) as tracker:
                tracker.log_input(DatasetInput(name="train", digest=prompts.sha256, source=spec.prompts))
                stage.train(tracker)
        else:
            stage.train(None)
        return stage.finish(model_dir, shape)
    finally:
        # No way out is taken while a checkpoint is still being written.
        stage.checkpoints.close()
        for pool in assembly.pools:
            pool.close()


def checkpoint_files(job: Job, spec: TrainSpec) -> CheckpointFiles:
    """Where a stage's checkpoints go: into a directory, or through the job's own into an object store."""
    mirrored = store.is_s3(spec.checkpoint_dir)
    return CheckpointFiles(
        job.dir / "checkpoints" if mirrored else Path(spec.checkpoint_dir), keep_last=spec.checkpoints_kept,
        keep_best=spec.keep_best, mirror=Mirror(spec.checkpoint_dir) if mirrored else None, guard=job.fence.commit,
        warn=lambda line: job.event("warning", message=line))


@dataclass
class Position:
    """Where a run stands; with the models, all that a checkpoint holds."""

    iteration: int
    """Iterations completed over all stages: the version of the policy."""
    stage_start: int
    """`iteration` when this stage began."""
    algorithm: AlgorithmState
    alarms_in_a_row: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last iteration; empty before the first."""


class Stage:
    """The loop of one stage on one rank."""

    def __init__(self, job: Job, spec: TrainSpec, world: World, assembly: Assembly, clock: PhaseClock):
        self.job, self.spec, self.world, self.clock = job, spec, world, clock
        self.roles, self.models = assembly.roles, assembly.models
        self.checkpoints = Checkpoints(checkpoint_files(job, spec), world)
        self.iterate = iteration_for(spec.algorithm)
        self.position = self._resume()
        self.started = time.monotonic()

    def train(self, tracker: Tracker | None) -> None:
        """Run the iterations that are missing."""
        at, spec = self.position, self.spec
        while at.iteration < at.stage_start + spec.iterations:
            begin = time.monotonic()
            self.roles.rollout.iteration = at.iteration
            prompts = self.roles.cursor.take(spec.prompts_per_iteration)
            batch, metrics = self.iterate(self.roles, prompts, spec.algorithm, at.algorithm)
            at.iteration += 1
            self._check(batch, metrics)
            at.metrics = metrics | self._measure(time.monotonic() - begin)
            self._report(tracker, at.metrics)
            self.checkpoints.poll()
            if spec.checkpoint_every and (at.iteration - at.stage_start) % spec.checkpoint_every == 0:
                self._save()

    def finish(self, model_dir: Path, shape: ModelShape) -> RunResult:
        """Export the policy while the last checkpoint is being written, and commit both."""
        self.job.progress("export", self._done, self.spec.iterations)
        if self.checkpoints.step != self.position.iteration:
            self._save()
        export = self._export(model_dir, shape)
        self.checkpoints.wait()
        last = self.position.metrics
        seconds = time.monotonic() - self.started
        peaks = {f"memory/{phase}_bytes": float(peak) for phase, peak in self.clock.peak_bytes.items()}
        return RunResult(
            stage="train",
            outputs={
                "checkpoint": store.join(self.spec.checkpoint_dir, name_of(self.position.iteration)),
                "export": self.spec.export_dir, **self._best()},
            metrics={name: last[name] for name in sorted(last)} | peaks,
            hashes={"weights": store.hash_model_dir(export) if self.world.rank == 0 else "",
                    "prompts": self.roles.cursor.prompts.sha256, "spec": hash_spec(self.spec)},
            policy_version=self.position.iteration,
            gpu_seconds=seconds * self.world.size,
            timings_s={"train": seconds},
        )

    @property
    def _done(self) -> int:
        return self.position.iteration - self.position.stage_start

    def _resume(self) -> Position:
        """This stage's own newest checkpoint, else that of the stage before, else the beginning."""
        state = self.checkpoints.load(self.models)
        if state is not None and state["spec"] != hash_spec(self.spec):
            raise SpecError(f"checkpoint_dir: {self.spec.checkpoint_dir} holds checkpoints of a job with another spec; "
                            "choose another directory, or remove it")
        if state is None and self.spec.resume_from is not None:
            state = self.checkpoints.load(self.models, self.spec.resume_from)
            state["stage_start"] = state["iteration"]
        if state is None:
            return Position(0, 0, initial_state(self.spec.algorithm))
        self.roles.cursor = PromptCursor.restore(self.roles.cursor.prompts, state["cursor"])
        self.job.event("resumed", iteration=state["iteration"])
        return Position(state["iteration"], state["stage_start"], AlgorithmState(**state["algorithm"]),
                        state["alarms_in_a_row"], state["metrics"])

    def _save(self) -> None:
        at = self.position
        state = {**asdict(at), "cursor": self.roles.cursor.state(), "spec": hash_spec(self.spec)}
        self.checkpoints.save(at.iteration, self.models, state, at.metrics)
        self.job.event("checkpoint", iteration=at.iteration, blocked_s=round(self.checkpoints.blocked_s, 3))

    def _best(self) -> dict[str, str]:
        name = self.checkpoints.files.best if self.spec.keep_best else None
        return {"best_checkpoint": store.join(self.spec.checkpoint_dir, name)} if name else {}

    def _export(self, model_dir: Path, shape: ModelShape) -> Path:
        """Write the policy where the spec says; the local directory with it."""
        target = Path(self.spec.export_dir)
        if store.is_s3(self.spec.export_dir):
            target = self.job.dir / "export"
        if self.world.rank == 0:
            with self.job.fence.commit():
                pass
        export_hf(model_dir, target, MegatronSharding(shape, self.spec.layout), self.models["actor"].params())
        if store.is_s3(self.spec.export_dir) and self.world.rank == 0:
            # Without its configuration a directory is no model: that goes last.
            store.upload_dir(target, self.spec.export_dir, last="config.json")
        return target

    def _check(self, batch: Any, metrics: dict[str, float]) -> None:
        """Count iterations whose numbers were not finite; the dataflow has updated nothing in them."""
        at = self.position
        at.alarms_in_a_row = at.alarms_in_a_row + 1 if metrics["alarms/nan"] else 0
        if at.alarms_in_a_row:
            self.job.event("alarm", iteration=at.iteration, rows=metrics["alarms/nan"],
                           samples=batch["sample_ids"][batch["nonfinite"]].tolist())
        if at.alarms_in_a_row >= MAX_ALARMS_IN_A_ROW:
            raise NumericsError(
                f"iteration {at.iteration}: {metrics['alarms/nan']:.0f} samples with NaN or infinity, "
                f"{at.alarms_in_a_row} iterations in a row; nothing was updated in them")

    def _measure(self, seconds: float) -> dict[str, float]:
        """The iteration's time by phase, throughput, and what the roles measured."""
        rollout, phases = self.roles.rollout, self.clock.take()
        moved, rollout.transitions = rollout.transitions, []
        measured = {f"time/{name}_s": value for name, value in phases.items()}
        return measured | rollout.rollout.metrics | self.roles.reward.worker.take_metrics() | {
            "time/iteration_s": seconds,
            "time/other_s": seconds - sum(phases.values()),
            "time/samples_per_s": self.spec.samples_per_iteration / seconds,
            "transition/bytes_received": float(sum(t.bytes_received for t in moved)),
        }

    def _report(self, tracker: Tracker | None, metrics: dict[str, float]) -> None:
        if tracker is not None:
            tracker.log(self.position.iteration, metrics)
        shown = {"reward": metrics["reward/mean"], "tokens_per_s": metrics["rollout/tokens_per_s"],
                 "iteration_s": metrics["time/iteration_s"]}
        shown = {name: round(value, 4) for name, value in shown.items()}
        self.job.event("iteration", iteration=self._done, of=self.spec.iterations, **shown)
        self.job.progress("train", self._done, self.spec.iterations, **shown)
