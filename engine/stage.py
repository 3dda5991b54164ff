"""The loop of a stage that trains: iterations, checkpoints on the way, a Hugging Face directory at the end."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from engine import store
from engine.backends.megatron.parallel import World
from engine.backends.megatron.trainer import TrainedModel
from engine.checkpoint import CheckpointFiles, Checkpoints
from engine.checkpoint.files import name_of
from engine.checkpoint.mirror import Mirror
from engine.errors import SpecError
from engine.job import Job
from engine.spec.job import RunResult, hash_spec
from engine.spec.tracking import parameters
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

    def export(self, target: Path) -> None:
        """Write the Hugging Face directory of what was trained."""


def checkpoint_files(job: Job, spec: TrainingSpec) -> CheckpointFiles:
    """Where a stage's checkpoints go: into a directory, or through the job's own into an object store."""
    mirrored = store.is_s3(spec.checkpoint_dir)
    return CheckpointFiles(
        job.dir / "checkpoints" if mirrored else Path(spec.checkpoint_dir), keep_last=spec.checkpoints_kept,
        keep_best=spec.keep_best, mirror=Mirror(spec.checkpoint_dir) if mirrored else None, guard=job.fence.commit,
        warn=lambda line: job.event("warning", message=line))


class Stage:
    """One stage on one rank."""

    def __init__(self, job: Job, spec: TrainingSpec, world: World, learner: Learner):
        """Starts where this stage's own newest checkpoint is, else where the stage before ended, else anew."""
        self.job, self.spec, self.world, self.learner = job, spec, world, learner
        self.checkpoints = Checkpoints(checkpoint_files(job, spec), world, self._saved)
        self.metrics: Metrics = {}
        """Of the last iteration; empty before the first."""
        self.iteration, self.stage_start = self._resume()
        self.started = time.monotonic()

    def run(self, dataset: DatasetInput) -> RunResult:
        """Run the iterations that are missing, commit the last checkpoint, export.

        Args:
            dataset: what is trained on, for the lineage.
        """
        try:
            if self.world.rank == 0:
                with Tracker(self.job.dir, self.spec.tracking) as tracker:
                    tracker.log_params(parameters(self.spec, without={"tracking", "schema_version"}))
                    tracker.log_input(dataset)
                    self._train(tracker)
            else:
                self._train(None)
            return self._finish(dataset.digest)
        finally:
            # No way out is taken while a checkpoint is still being written.
            self.checkpoints.close()

    @property
    def _done(self) -> int:
        return self.iteration - self.stage_start

    def _train(self, tracker: Tracker | None) -> None:
        found = self.learner.begin()
        if tracker is not None and found:
            tracker.log(self.iteration, found)
        while self._done < self.spec.iterations:
            begin = time.monotonic()
            metrics = self.learner.iterate(self.iteration)
            self.iteration += 1
            self.metrics = metrics | self.learner.measure(time.monotonic() - begin)
            self._report(tracker)
            self.checkpoints.poll()
            if self.spec.checkpoint_every and self._done % self.spec.checkpoint_every == 0:
                self._save()

    def _finish(self, prompts_sha256: str) -> RunResult:
        """Export the model while the last checkpoint is being written, and commit both."""
        self.job.progress("export", self._done, self.spec.iterations)
        if self.checkpoints.step != self.iteration:
            self._save()
        summary = self.learner.summary()
        export = self._export()
        self.checkpoints.wait()
        seconds = time.monotonic() - self.started
        return RunResult(
            stage=self.spec.stage,
            outputs={"checkpoint": store.join(self.spec.checkpoint_dir, name_of(self.iteration)),
                     "export": self.spec.export_dir, **self._best()},
            metrics={name: self.metrics[name] for name in sorted(self.metrics)} | summary,
            hashes={"weights": store.hash_model_dir(export) if self.world.rank == 0 else "",
                    "prompts": prompts_sha256, "spec": hash_spec(self.spec)},
            policy_version=self.iteration,
            gpu_seconds=seconds * self.world.size,
            timings_s={self.spec.stage: seconds},
        )

    def _resume(self) -> tuple[int, int]:
        state = self.checkpoints.load(self.learner.models)
        if state is not None and state["spec"] != hash_spec(self.spec):
            raise SpecError(f"checkpoint_dir: {self.spec.checkpoint_dir} holds checkpoints of a job with another spec; "
                            "choose another directory, or remove it")
        if state is not None:
            self.checkpoints.complete()
        if state is None and self.spec.resume_from is not None:
            state = self.checkpoints.load(self.learner.models, self.spec.resume_from)
            state["stage_start"] = state["iteration"]
        if state is None:
            return 0, 0
        self.learner.restore(state)
        self.metrics = state["metrics"]
        self.job.event("resumed", iteration=state["iteration"])
        return state["iteration"], state["stage_start"]

    def _save(self) -> None:
        state = {"iteration": self.iteration, "stage_start": self.stage_start, "spec": hash_spec(self.spec),
                 "metrics": self.metrics}
        self.checkpoints.save(self.iteration, self.learner.models, state | self.learner.state(), self.metrics)

    def _saved(self, iteration: int, blocked_s: float, whole_s: float) -> None:
        self.job.event("checkpoint", iteration=iteration, blocked_s=round(blocked_s, 3), whole_s=round(whole_s, 3))

    def _best(self) -> dict[str, str]:
        name = self.checkpoints.files.best if self.spec.keep_best else None
        return {"best_checkpoint": store.join(self.spec.checkpoint_dir, name)} if name else {}

    def _export(self) -> Path:
        """Write the model where the spec says; the local directory with it."""
        mirrored = store.is_s3(self.spec.export_dir)
        target = self.job.dir / "export" if mirrored else Path(self.spec.export_dir)
        if self.world.rank == 0:
            with self.job.fence.commit():
                pass
        self.learner.export(target)
        if mirrored and self.world.rank == 0:
            # Without its configuration a directory is no model: that goes last.
            store.upload_dir(target, self.spec.export_dir, last="config.json")
        return target

    def _report(self, tracker: Tracker | None) -> None:
        if tracker is not None:
            tracker.log(self.iteration, self.metrics)
        shown = {name: round(value, 4) for name, value in self.learner.shown(self.metrics).items()}
        self.job.event("iteration", iteration=self._done, of=self.spec.iterations, **shown)
        self.job.progress(self.spec.stage, self._done, self.spec.iterations, **shown)
