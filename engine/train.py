"""The train stage: iterations of an RL algorithm, checkpoints on the way, a Hugging Face directory at the end."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.backends.megatron.parallel import start_world
from engine.controller.build import Assembly, Builder
from engine.controller.phases import PhaseClock
from engine.dataflows import AlgorithmState, initial_state, iteration_for
from engine.errors import NumericsError
from engine.job import Job
from engine.layout import check_generation_layout, check_layout, read_model_shape
from engine.model_files import local_model
from engine.prompts import PromptCursor, PromptSet
from engine.ranks import join_ranks
from engine.resharding.export import export_hf
from engine.resharding.megatron import MegatronSharding
from engine.spec.job import RunResult
from engine.spec.train import TrainSpec
from engine.stage import Metrics, Stage
from engine.tracking import DatasetInput

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
    stage = Stage(job, spec, world, PolicyLearner(job, spec, model_dir, assembly, clock))
    job.event("ready", seconds=round(time.monotonic() - started, 2), layout=str(spec.layout))
    try:
        return stage.run(DatasetInput(name="train", digest=prompts.sha256, source=spec.prompts))
    finally:
        for pool in assembly.pools:
            pool.close()


class PolicyLearner:
    """Iterations of an algorithm on the roles of one rank."""

    def __init__(self, job: Job, spec: TrainSpec, model_dir: Path, assembly: Assembly, clock: PhaseClock):
        self.job, self.spec, self.model_dir, self.clock = job, spec, model_dir, clock
        self.roles, self.models = assembly.roles, assembly.models
        self.dataflow = iteration_for(spec.algorithm)
        self.algorithm = initial_state(spec.algorithm)
        self.alarms_in_a_row = 0
        self.alarms = 0.0
        """Rows with NaN or infinity, over all stages so far."""

    def begin(self) -> Metrics:
        """Nothing: what the first iteration generates is the measurement."""
        return {}

    def iterate(self, iteration: int) -> Metrics:
        """Generate, score, update."""
        self.roles.rollout.iteration = iteration
        prompts = self.roles.cursor.take(self.spec.prompts_per_iteration)
        batch, metrics = self.dataflow(self.roles, prompts, self.spec.algorithm, self.algorithm)
        self._check(iteration + 1, batch, metrics)
        return metrics

    def measure(self, seconds: float) -> Metrics:
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

    def shown(self, metrics: Metrics) -> Metrics:
        """Reward and speed."""
        return {"reward": metrics["reward/mean"], "tokens_per_s": metrics["rollout/tokens_per_s"],
                "iteration_s": metrics["time/iteration_s"]}

    def state(self) -> dict[str, Any]:
        """See `engine.stage.Learner`."""
        return {"algorithm": asdict(self.algorithm), "alarms_in_a_row": self.alarms_in_a_row,
                "alarms": self.alarms, "cursor": self.roles.cursor.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """See `engine.stage.Learner`."""
        self.roles.cursor = PromptCursor.restore(self.roles.cursor.prompts, state["cursor"])
        self.algorithm = AlgorithmState(**state["algorithm"])
        self.alarms_in_a_row, self.alarms = state["alarms_in_a_row"], state["alarms"]

    def summary(self) -> Metrics:
        """Peak memory by phase; alarms of all iterations, which a gate may limit, not of the last one alone."""
        peaks = {f"memory/{phase}_bytes": float(peak) for phase, peak in self.clock.peak_bytes.items()}
        return {"alarms/nan": self.alarms, **peaks}

    def export(self, target: Path) -> None:
        """The policy."""
        sharding = MegatronSharding(read_model_shape(self.model_dir), self.spec.layout)
        export_hf(self.model_dir, target, sharding, self.models["actor"].params())

    def _check(self, iteration: int, batch: Any, metrics: Metrics) -> None:
        """Count iterations whose numbers were not finite; the dataflow has updated nothing in them."""
        self.alarms += metrics["alarms/nan"]
        self.alarms_in_a_row = self.alarms_in_a_row + 1 if metrics["alarms/nan"] else 0
        if self.alarms_in_a_row:
            self.job.event("alarm", iteration=iteration, rows=metrics["alarms/nan"],
                           samples=batch["sample_ids"][batch["nonfinite"]].tolist())
        if self.alarms_in_a_row >= MAX_ALARMS_IN_A_ROW:
            raise NumericsError(
                f"iteration {iteration}: {metrics['alarms/nan']:.0f} samples with NaN or infinity, "
                f"{self.alarms_in_a_row} iterations in a row; nothing was updated in them")
