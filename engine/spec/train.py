"""Spec of the train stage."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from engine.layout import GenerationLayout, ParallelLayout
from engine.spec.algorithm import Algorithm
from engine.spec.base import URI, Count, Spec
from engine.spec.reward import Reward
from engine.spec.tracking import TrackingSpec


class OptimizerSpec(Spec):
    """AdamW with warm-up, a schedule, and clipping by global norm."""

    lr: float = Field(gt=0)
    """Peak learning rate."""
    min_lr_share: float = Field(0.1, ge=0, le=1)
    """The schedule ends at this share of `lr`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up."""
    decay_steps: int | None = Field(None, ge=1)
    """Optimizer steps over which the schedule runs; None: those of this stage, in a pipeline of all stages."""
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    epsilon: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)


class RolloutSpec(Spec):
    """How responses are generated."""

    layout: GenerationLayout = GenerationLayout()
    max_response_tokens: Count
    temperature: float = Field(1.0, gt=0)
    kv_cache_bytes: Annotated[int, Field(ge=1 << 20)] = 256 << 20
    """KV cache of one rank."""
    max_concurrent_sequences: Count = 64
    """Sequences one replica decodes at once."""
    release_memory: bool = True
    """Give the memory of generation back while training; False keeps it for a faster return to generation."""


class KeepBest(Spec):
    """Which checkpoint is the best of a stage."""

    metric: str
    """A metric of the iterations, for example `reward/mean`; it is an error when they do not measure it."""
    better: Literal["higher", "lower"] = "higher"

    def is_better(self, value: float, than: float) -> bool:
        """Whether `value` beats `than`; NaN beats nothing."""
        return value > than if self.better == "higher" else value < than


class TrainingSpec(Spec):
    """What all stages that train models have in common."""

    stage: str
    schema_version: Literal[1] = 1
    model: URI
    """Hugging Face directory that every model of the job starts from."""
    prompts: URI
    """Output directory of the prepare stage."""
    layout: ParallelLayout = ParallelLayout()
    sequence_parallel: bool = False
    """Divide norms and residuals over the tp ranks, by tokens."""
    iterations: Count
    """Iterations of this stage."""
    microbatch_tokens: Count = 4096
    """Token budget of one forward on one rank, padding included."""
    resume_from: URI | None = None
    """Checkpoint directory of the stage before; None starts from `model`."""
    checkpoint_dir: URI
    """Where this stage's checkpoints go; a retry goes on from the newest there."""
    checkpoint_every: Count | None = None
    """Iterations between checkpoints; None: only at the end of the stage."""
    checkpoints_kept: Count = 2
    """Newest checkpoints of the stage that are kept."""
    keep_best: KeepBest | None = None
    """Keep the best checkpoint of the stage beside the newest; `best.json` names it."""
    stall_limit_s: Annotated[int, Field(ge=60)] = 3600
    """Without a sign of progress for so long the job is ended as hung; longer than the longest phase of an iteration,
    compilations included."""
    export_dir: URI
    """Where the Hugging Face directory of the trained model goes."""
    seed: int = 0
    tracking: TrackingSpec = TrackingSpec()


class TrainSpec(TrainingSpec):
    """Some iterations of an RL algorithm, from a model or from the checkpoint of the stage before.

    The policy, the critic's backbone and the reference start from `model`; of `prompts`, the set `train` is used.
    """

    stage: Literal["train"] = "train"
    algorithm: Algorithm
    rewards: list[Reward] = Field(min_length=1)
    rollout: RolloutSpec
    actor: OptimizerSpec
    critic: OptimizerSpec | None = None
    """Needed by algorithms with a critic."""
    prompts_per_iteration: Count
    """P: prompts of one iteration, over all ranks."""
    minibatches: Count = 1
    """Optimizer steps one pass over an iteration's samples is divided into."""
    epochs: Count = 1
    """Passes over an iteration's samples."""

    @property
    def samples_per_iteration(self) -> int:
        """B = P * G sequences."""
        return self.prompts_per_iteration * self.algorithm.samples_per_prompt

    @model_validator(mode="after")
    def _sizes_divide(self):
        samples, replicas = self.samples_per_iteration, self.rollout.layout.replicas(self.layout.world_size)
        for name, parts in (("layout.dp x minibatches", self.layout.dp * self.minibatches),
                            ("rollout replicas", replicas)):
            if samples % parts:
                raise ValueError(
                    f"prompts_per_iteration {self.prompts_per_iteration} x samples_per_prompt "
                    f"{self.algorithm.samples_per_prompt} = {samples} samples do not divide by {name} = {parts}; "
                    f"choose prompts_per_iteration so that they do")
        parts = self.layout.dp * self.minibatches
        if self.algorithm.kind == "remax" and self.prompts_per_iteration % parts:
            raise ValueError(
                f"prompts_per_iteration {self.prompts_per_iteration} greedy responses of remax do not divide by "
                f"layout.dp x minibatches = {parts}; choose a multiple of {parts}")
        return self

    @model_validator(mode="after")
    def _overlong_buffer_fits(self):
        overlong, limit = self.algorithm.overlong, self.rollout.max_response_tokens
        if overlong is not None and overlong.kind == "shaping" and overlong.buffer_tokens > limit:
            raise ValueError(f"algorithm.overlong.buffer_tokens {overlong.buffer_tokens} is more than "
                             f"rollout.max_response_tokens {limit}; choose a part of it")
        return self

    @model_validator(mode="after")
    def _critic_where_needed(self):
        kind = self.algorithm.kind
        if self.algorithm.needs_critic and self.critic is None:
            raise ValueError(
                f"critic: algorithm {kind} trains a critic; give it an optimizer, for example {{lr: 1.0e-5}}")
        if not self.algorithm.needs_critic and self.critic is not None:
            raise ValueError(f"critic: algorithm {kind} has no critic; remove the field")
        return self
