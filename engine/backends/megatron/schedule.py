"""The learning rate as a function of the step: nothing to save, nothing to step twice on a resume."""

import math

from engine.errors import SpecError
from engine.spec.train import OptimizerSpec


def check_schedule(spec: OptimizerSpec, total_steps: int) -> None:
    """Refuse a warm-up that is not over before the schedule ends.

    Raises:
        SpecError: says both numbers.
    """
    steps = spec.decay_steps or total_steps
    if spec.schedule != "constant" and spec.warmup_steps >= steps:
        raise SpecError(
            f"warmup_steps {spec.warmup_steps} is not below the {steps} steps of the {spec.schedule} schedule")


def learning_rate(step: int, spec: OptimizerSpec, total_steps: int) -> float:
    """Learning rate of optimizer step `step`, counted from 0.

    Warm-up rises linearly and reaches the peak with its last step, so that no step is spent at rate 0. After that the
    rate falls from `lr` to `min_lr_share * lr` at step `decay_steps` and stays there.

    Args:
        step: optimizer steps before this one, over the whole run.
        spec: peak, shape and lengths.
        total_steps: used where the spec gives no `decay_steps`.
    """
    if step < spec.warmup_steps:
        return spec.lr * (step + 1) / spec.warmup_steps
    if spec.schedule == "constant":
        return spec.lr
    steps = (spec.decay_steps or total_steps) - spec.warmup_steps
    done = min(1.0, (step - spec.warmup_steps) / steps)
    share = 1 - done if spec.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    floor = spec.lr * spec.min_lr_share
    return floor + (spec.lr - floor) * share
