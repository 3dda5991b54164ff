"""What an algorithm carries from one iteration to the next. It belongs into every checkpoint."""

from dataclasses import dataclass, field

from engine.spec.algorithm import PolicyAlgorithm, SafeRLHF


@dataclass
class AlgorithmState:
    """Plain numbers, the same on every rank: `dataclasses.asdict` saves them, `AlgorithmState(**saved)` restores."""

    kl_coefficient: float
    """Of the next iteration."""
    multiplier: float = 0.0
    """Safe-RLHF's Lagrange multiplier, before the next iteration moves it."""
    recent_costs: list[float] = field(default_factory=list)
    """Mean costs of the last iterations, oldest first; at most `cost_window`."""
    iterations: int = 0
    """Completed."""


def initial_state(algorithm: PolicyAlgorithm) -> AlgorithmState:
    """The state before the first iteration."""
    kl = algorithm.kl
    coefficient = kl.initial_coefficient if kl.kind == "adaptive" else kl.coefficient
    multiplier = algorithm.initial_multiplier if isinstance(algorithm, SafeRLHF) else 0.0
    return AlgorithmState(kl_coefficient=coefficient, multiplier=multiplier)
