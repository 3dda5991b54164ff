"""May this candidate replace the champion? Pure functions of evidence and policy; no network, no files."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from engine.spec.evaluation import ModelEvaluation
from engine.spec.gate import GatePolicy, GuardMetric, Limit, PrimaryMetric
from engine.statistics import (
    PairedResult,
    PairedTest,
    cluster_labels,
    detectable_difference,
    holm,
    paired_tests,
    prompt_scores,
)
from tasks.markdown import cell

SHARES = ("pass_at_1", "greedy_pass")
"""Scores that are shares of responses: their differences are told in percentage points."""


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
    """By primary score: the rise this prompt set would find with the policy's power; infinite when none would be."""

    def markdown(self) -> str:
        """The table as Markdown, for the approval's body, the run note and the model version's description."""
        lines = [f"**Gate {'passed' if self.passed else 'failed'}**", ""]
        lines += [f"- {cell(reason, 1000)}" for reason in self.reasons]
        lines += ["", "| | Check | Champion | Candidate | Evidence |", "|---|---|---|---|---|"]
        for row in self.table:
            cells = [cell(content, 1000) for content in (row.check, row.champion, row.candidate, row.evidence)]
            lines.append(f"| {'✓' if row.passed else '✗'} | {' | '.join(cells)} |")
        return "\n".join(lines) + "\n"

    def to_dict(self) -> dict:
        """Plain JSON types (a number that is not finite becomes None), small enough for XCom."""
        return {
            "passed": self.passed,
            "reasons": list(self.reasons),
            "table": [{key: _finite(value) for key, value in asdict(row).items()} for row in self.table],
            "detectable": {score: _finite(value) for score, value in self.detectable.items()},
        }


def gate(evidence: GateEvidence, policy: GatePolicy) -> GateResult:
    """Decide by `policy` whether the candidate may be promoted.

    Every check is made, so that the table is whole. An absent or NaN metric fails its check.
    """
    rows = [*_identity_rows(evidence), _sample_row(evidence, policy)]
    detectable: dict[str, float] = {}
    comparable = all(row.passed for row in rows if row.check in ("same prompts", "enough prompts"))
    unusable = _unusable_scores(evidence, policy)
    if comparable and not unusable:
        primary, detectable = _primary_rows(evidence, policy)
        rows += primary
    else:
        rows += [GateRow(f"{p.score} rises", None, None, unusable.get(p.score, "not compared, see above"), False)
                 for p in policy.primary]
    rows += [_guard_row(evidence, guard) for guard in policy.guards]
    rows += [_limit_row(evidence, limit) for limit in policy.limits]
    failures = tuple(f"{row.check}: {row.evidence}" for row in rows if not row.passed)
    shown = tuple(f"{row.check}: {row.evidence}" for row in rows if row.passed and row.check.endswith(" rises"))
    return GateResult(not failures, failures or shown, tuple(rows), detectable)


def _identity_rows(evidence: GateEvidence) -> list[GateRow]:
    candidate, champion = evidence.candidate, evidence.champion
    ids, champion_ids = [p.id for p in candidate.prompts], [p.id for p in champion.prompts]
    missing, repeated = len(set(ids) ^ set(champion_ids)), len(ids) - len(set(ids))
    same_set = candidate.prompts_hash == champion.prompts_hash and bool(candidate.prompts_hash)
    same = same_set and candidate.settings_hash == champion.settings_hash and not missing and not repeated
    trouble = (f"prompt sets {champion.prompts_hash[:12]!r} and {candidate.prompts_hash[:12]!r}, settings "
               f"{champion.settings_hash[:12]!r} and {candidate.settings_hash[:12]!r}, {missing} prompts in only one "
               f"of the two, {repeated} repeated; evaluate both on one set with the same settings")
    unchanged = bool(evidence.files_hash) and evidence.files_hash == candidate.weights_hash
    files = ("the exported files are those evaluated" if unchanged else
             f"evaluated weights {candidate.weights_hash[:12]!r}, files to promote {evidence.files_hash[:12]!r}; "
             "evaluate the files again")
    return [
        GateRow("same files", None, evidence.files_hash[:12], files, unchanged),
        GateRow("same prompts", champion.prompts_hash[:12], candidate.prompts_hash[:12],
                f"{len(ids)} prompts, paired by id" if same else trouble, same),
    ]


def _sample_row(evidence: GateEvidence, policy: GatePolicy) -> GateRow:
    count = len(set(cluster_labels(evidence.candidate.prompts)))
    enough = count >= max(policy.min_prompts, 2)
    text = f"{count} independent prompts, at least {policy.min_prompts} are needed"
    return GateRow("enough prompts", len(evidence.champion.prompts), len(evidence.candidate.prompts), text, enough)


def _unusable_scores(evidence: GateEvidence, policy: GatePolicy) -> dict[str, str]:
    """Primary scores that are absent or not finite for some prompt, with the reason."""
    reasons: dict[str, str] = {}
    for primary in policy.primary:
        for model in (evidence.champion, evidence.candidate):
            try:
                scores = prompt_scores(model.prompts, primary.score, evidence.pass_threshold)
            except ValueError as error:
                reasons[primary.score] = f"{model.model}: {error}"
                continue
            bad = int((~np.isfinite(scores)).sum())
            if bad:
                reasons[primary.score] = f"{model.model}: {bad} of {len(scores)} scores are not finite"
    return reasons


def _primary_rows(evidence: GateEvidence, policy: GatePolicy) -> tuple[list[GateRow], dict[str, float]]:
    order = {p.id: i for i, p in enumerate(evidence.candidate.prompts)}
    champion_prompts = sorted(evidence.champion.prompts, key=lambda p: order[p.id])
    scores = [(prompt_scores(champion_prompts, p.score, evidence.pass_threshold),
               prompt_scores(evidence.candidate.prompts, p.score, evidence.pass_threshold)) for p in policy.primary]
    differences = np.stack([new - old for old, new in scores], axis=1)
    clusters = cluster_labels(evidence.candidate.prompts)
    # With `all`, every test has to reject: an intersection-union test, whose level needs no correction.
    tested = len(policy.primary) if policy.require == "any" else 1
    results = paired_tests(differences, [p.margin for p in policy.primary],
                           PairedTest(policy.alpha / tested, policy.bootstrap_samples, policy.seed), clusters)
    p_values = [r.p_value for r in results]
    rises = risen(p_values, policy)
    detectable: dict[str, float] = {
        p.score: detectable_difference(differences[:, k], margin=p.margin, alpha=policy.alpha / tested,
                                       power=policy.power, clusters=clusters)
        for k, p in enumerate(policy.primary)}
    rows = []
    for k, primary in enumerate(policy.primary):
        # One proven rise is enough under `any`, if this score did not fall.
        passed = rises[k] or (policy.require == "any" and any(rises) and results[k].difference >= -policy.tolerance)
        text = _describe(results[k], primary, p_values[k], detectable[primary.score], policy)
        old, new = scores[k]
        rows.append(GateRow(f"{primary.score} {'rises' if rises[k] or not passed else 'holds'}",
                            float(old.mean()), float(new.mean()), text, bool(passed)))
    return rows, detectable


def risen(p_values: Sequence[float], policy: GatePolicy) -> list[bool]:
    """Which primary metrics have risen: Holm-adjusted under `any`, each at alpha under `all`."""
    adjusted = holm(p_values) if policy.require == "any" else p_values
    return [p <= policy.alpha for p in adjusted]


def _describe(result: PairedResult, primary: PrimaryMetric, p_value: float, detectable: float,
              policy: GatePolicy) -> str:
    size = f"{100 * detectable:+.3g} points" if primary.score in SHARES else f"{detectable:+.3g}"
    power = (f"this set can detect {size} (with power {policy.power:.0%})" if math.isfinite(detectable)
             else "too few prompts changed for this set to detect a rise")
    corrected = ", Holm" if len(policy.primary) > 1 and policy.require == "any" else ""
    tests = (f"p = {p_value:.2g} (bootstrap {result.p_bootstrap:.2g}, sign {result.p_sign:.2g}; level "
             f"{policy.alpha:g}{corrected})")
    return (f"{result.difference:+.4g} (lower bound {result.low:+.4g}, margin {primary.margin:g}), {result.wins} "
            f"better and {result.losses} worse, {tests}; {power}")


def _guard_row(evidence: GateEvidence, guard: GuardMetric) -> GateRow:
    old, new = evidence.champion.metrics.get(guard.metric), evidence.candidate.metrics.get(guard.metric)
    check = f"guard {guard.metric}"
    for name, value in (("champion", old), ("candidate", new)):
        if value is None or not math.isfinite(value):
            return GateRow(check, old, new, f"{name}'s {guard.metric} is {'absent' if value is None else value}", False)
    loss = (old - new) if guard.better == "higher" else (new - old)  # type: ignore[operator]
    # A loss equal to the tolerance is accepted, whatever the rounding of the subtraction.
    passed = loss <= guard.tolerance + 1e-9 * max(1.0, abs(old), abs(new))  # type: ignore[arg-type]
    word = "worse" if loss > 0 else "better"
    return GateRow(check, old, new, f"{abs(loss):.4g} {word}, tolerance {guard.tolerance:g}", passed)


def _limit_row(evidence: GateEvidence, limit: Limit) -> GateRow:
    metrics = evidence.training | evidence.candidate.metrics
    value = metrics.get(limit.metric)
    ends = (("at least", limit.minimum), ("at most", limit.maximum))
    bounds = " and ".join(f"{word} {bound:g}" for word, bound in ends if bound is not None)
    check = f"limit {limit.metric}"
    if value is None or not math.isfinite(value):
        return GateRow(check, None, value, f"{'absent' if value is None else value}, must be {bounds}", False)
    low = -math.inf if limit.minimum is None else limit.minimum
    high = math.inf if limit.maximum is None else limit.maximum
    return GateRow(check, None, value, f"{value:.4g}, must be {bounds}", low <= value <= high)


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
