"""May this candidate replace the champion? Pure functions of evidence and policy; no network, no files."""

from dataclasses import dataclass, field

from engine.spec.evaluation import ModelEvaluation
from engine.spec.gate import GatePolicy


@dataclass(frozen=True)
class GateEvidence:
    """Everything a gate looks at."""

    candidate: ModelEvaluation
    champion: ModelEvaluation
    """The model in production; the base model when there is no champion yet."""
    files_hash: str
    """Weights hash of the files that a promotion would point at."""
    training: dict[str, float] = field(default_factory=dict)
    """Metrics of the candidate's training: `actor/kl_to_reference`, `alarms/nan`, ..."""
    pass_threshold: float = 1.0


@dataclass(frozen=True)
class GateRow:
    """One check, as a line of the evidence table."""

    check: str
    """What was checked, for example `mean_reward rises` or `limit response_tokens`."""
    champion: float | str | None
    candidate: float | str | None
    evidence: str
    """The decisive numbers in words."""
    passed: bool


@dataclass(frozen=True)
class GateResult:
    """The verdict with its reasons."""

    passed: bool
    reasons: tuple[str, ...]
    """Why it failed, one sentence each; when it passed, what was shown."""
    table: tuple[GateRow, ...]
    detectable: dict[str, float]
    """By primary score: the rise this prompt set would detect with the policy's power."""

    def markdown(self) -> str:
        """The table as Markdown, for the approval's body, the run note and the model version's description."""
        raise NotImplementedError

    def to_dict(self) -> dict:
        """Plain JSON types, small enough for XCom."""
        raise NotImplementedError


def gate(evidence: GateEvidence, policy: GatePolicy) -> GateResult:
    """Decide by `policy` whether the candidate may be promoted.

    Every check is made, so that the table is whole. An absent or NaN metric fails its check.
    """
    raise NotImplementedError
