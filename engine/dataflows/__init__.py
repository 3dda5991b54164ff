"""One iteration of each algorithm, a few lines in which the paper can be recognised."""

from collections.abc import Callable, Sequence
from typing import Any

from tensordict import TensorDict

from engine.dataflows.group import group_iteration
from engine.dataflows.ppo import ppo_iteration
from engine.dataflows.reinforce import reinforce_pp_iteration, remax_iteration
from engine.dataflows.roles import Metrics, Roles
from engine.dataflows.safe_rlhf import safe_rlhf_iteration
from engine.dataflows.state import AlgorithmState, initial_state
from engine.spec.algorithm import PolicyAlgorithm

Iteration = Callable[[Roles, Sequence[Any], Any, AlgorithmState], tuple[TensorDict, Metrics]]

_ITERATIONS: dict[str, Iteration] = {
    "ppo": ppo_iteration, "safe_rlhf": safe_rlhf_iteration, "reinforce_pp": reinforce_pp_iteration,
    "remax": remax_iteration,
    **dict.fromkeys(("grpo", "dapo", "gspo", "cispo", "rloo", "opo"), group_iteration),
}


def iteration_for(algorithm: PolicyAlgorithm) -> Iteration:
    """The dataflow of an algorithm: `iteration(roles, prompts, algorithm, state) -> (batch, metrics)`.

    It moves `state` forward. The batch is this rank's; the metrics are the same on every rank. `alarms/nan` above 0
    means that nothing was updated; the batch's field `nonfinite` says which rows were to blame.
    """
    return _ITERATIONS[algorithm.kind]


__all__ = ["AlgorithmState", "Iteration", "initial_state", "iteration_for"]
