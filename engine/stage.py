"""The loop of a stage that trains: iterations, checkpoints on the way, a Hugging Face directory at the end."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from engine import store
from engine.backends.megatron.parallel import World
from engine.backends.megatron.trainer import TrainedModel
from engine.checkpoint.checkpoints import Checkpoints
from engine.errors import SpecError
from engine.job import Job
from engine.spec.job import RunResult, hash_spec
from engine.spec.train import TrainingSpec
from engine.tracking import DatasetInput, Tracker

Metrics = dict[str, float]


class Learner(Protocol):
    """What a stage repeats. Every rank calls each method; metrics are the same on every rank."""

    models: Mapping[str, TrainedModel]
    """What a checkpoint holds, by role."""

    def begin(self) -> Metrics:
        """Called before the first iteration of this process: metrics of the models as they are, if any."""

    def iterate(self, iteration: int) -> Metrics:
        """One iteration; `iteration` are those completed over all stages, the version of the policy."""

    def measure(self, seconds: float) -> Metrics:
        """What the iteration that took `seconds` cost."""

    def shown(self, metrics: Metrics) -> Metrics:
        """The few numbers of an iteration that a person wants to see."""

    def state(self) -> dict[str, Any]:
        """Plain JSON for a checkpoint: with the models, all that the next iteration depends on."""

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; its `iteration` equals its `stage_start` when that was in an earlier stage."""

    def summary(self) -> Metrics:
        """Metrics of the whole stage, beside those of its last iteration."""

    def export(self) -> None:
        """Write the Hugging Face directory of what was trained."""


def refuse_object_stores(spec: TrainingSpec) -> None:
    """Refuse URIs that a rank cannot open as a path.

    Raises:
        SpecError: names the field.
    """
    for name in ("model", "checkpoint_dir", "export_dir"):
        if store.is_s3(getattr(spec, name)):
            raise SpecError(f"{name}: {getattr(spec, name)} must be a path that all ranks share, not an object store")


class Stage:
    """One stage on one rank."""

    def __init__(self, job: Job, spec: TrainingSpec, world: World, learner: Learner):
        """Starts where this stage's own newest checkpoint is, else where the stage before ended, else anew."""
        self.job, self.spec, self.world, self.learner = job, spec, world, learner
        self.checkpoints = Checkpoints(
            spec.checkpoint_dir, world, spec.checkpoints_kept, warn=lambda line: job.event("warning", message=line))
        self.iteration, self.stage_start = self._resume()
        self.started = time.monotonic()

    def run(self, dataset: DatasetInput) -> RunResult:
        """Run the iterations that are missing, commit the last checkpoint, export.

        Args:
            dataset: what is trained on, for the lineage.
        """
        if self.world.rank == 0:
            with Tracker(self.job.dir, self.spec.tracking) as tracker:
                tracker.log_input(dataset)
                last = self._train(tracker)
        else:
            last = self._train(None)
        return self._finish(last, dataset.digest)

    @property
    def _done(self) -> int:
        return self.iteration - self.stage_start

    def _train(self, tracker: Tracker | None) -> Metrics:
        """The metrics of the last iteration; empty when none was missing."""
        metrics: Metrics = {}
        found = self.learner.begin()
        if tracker is not None and found:
            tracker.log(self.iteration, found)
        while self._done < self.spec.iterations:
            begin = time.monotonic()
            metrics = self.learner.iterate(self.iteration)
            self.iteration += 1
            metrics |= self.learner.measure(time.monotonic() - begin)
            self._report(tracker, metrics)
            if self.spec.checkpoint_every and self._done % self.spec.checkpoint_every == 0:
                self._save()
        return metrics

    def _finish(self, last: Metrics, prompts_sha256: str) -> RunResult:
        self.job.progress("export", self._done, self.spec.iterations)
        checkpoint = self._save()
        summary = self.learner.summary()
        self.learner.export()
        seconds = time.monotonic() - self.started
        return RunResult(
            stage=self.spec.stage,
            outputs={"checkpoint": str(checkpoint), "export": self.spec.export_dir},
            metrics={name: last[name] for name in sorted(last)} | summary,
            hashes={"weights": store.hash_model_dir(self.spec.export_dir) if self.world.rank == 0 else "",
                    "prompts": prompts_sha256, "spec": hash_spec(self.spec)},
            policy_version=self.iteration,
            gpu_seconds=seconds * self.world.size,
            timings_s={self.spec.stage: seconds},
        )

    def _resume(self) -> tuple[int, int]:
        state = self.checkpoints.load(self.learner.models)
        if state is None and self.spec.resume_from is not None:
            state = self.checkpoints.load(self.learner.models, self.spec.resume_from)
            state["stage_start"] = state["iteration"]
        if state is None:
            return 0, 0
        self.learner.restore(state)
        self.job.event("resumed", iteration=state["iteration"])
        return state["iteration"], state["stage_start"]

    def _save(self) -> Path:
        state = {"iteration": self.iteration, "stage_start": self.stage_start, "spec": hash_spec(self.spec)}
        return self.checkpoints.save(self.iteration, self.learner.models, state | self.learner.state())

    def _report(self, tracker: Tracker | None, metrics: Metrics) -> None:
        if tracker is not None:
            tracker.log(self.iteration, metrics)
        shown = {name: round(value, 4) for name, value in self.learner.shown(metrics).items()}
        self.job.event("iteration", iteration=self._done, of=self.spec.iterations, **shown)
        self.job.progress(self.spec.stage, self._done, self.spec.iterations, **shown)
