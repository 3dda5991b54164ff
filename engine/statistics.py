"""Statistics of evaluations: intervals, paired tests, detectable differences. numpy only; usable above the boundary.

Letters: P prompts, C clusters of prompts (independent of one another), K comparisons side by side, R resamples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from engine.spec.evaluation import PromptScores

NOISE = 1e-12
"""Score differences below this are ties: sums of the same numbers in another order."""
SCORES = ("mean_reward", "pass_at_1", "greedy_reward", "greedy_pass")


@dataclass(frozen=True)
class Interval:
    """A mean and its confidence interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class PairedResult:
    """Is B better than A on the same prompts?"""

    difference: float
    """Mean of B - A over prompts."""
    low: float
    """One-sided lower bound of the difference at the level asked for."""
    high: float
    """One-sided upper bound at the same level."""
    p_bootstrap: float
    """Of the hypothesis difference <= margin."""
    p_sign: float
    """Exact sign test of the hypothesis that B wins no more clusters than A."""
    wins: int
    losses: int

    @property
    def p_value(self) -> float:
        """Both tests must reject, so the larger one counts."""
        return max(self.p_bootstrap, self.p_sign)


@dataclass(frozen=True)
class PairedTest:
    """How differences are tested."""

    alpha: float = 0.05
    """One-sided level of the bounds."""
    resamples: int = 10_000
    seed: int = 0


def mean_interval(values: Sequence[float] | np.ndarray, level: float = 0.95,
                  clusters: Sequence[str] | None = None) -> Interval:
    """Mean with Student's interval; values of one cluster may depend on each other (cluster-robust variance).

    Args:
        values: [P], any units; NaN makes the result NaN. Several samples of one prompt: give the prompt's mean.
        level: two-sided coverage.
        clusters: [P] a label each; None: all independent.
    Returns:
        The interval; low = high = NaN when there is a single cluster or a value is not finite.
    Raises:
        ValueError: no values.
    """
    sums, sizes = _cluster_sums(np.asarray(values, dtype=float)[:, None], clusters)
    count, total = len(sizes), sizes.sum()
    mean = float(sums.sum() / total)
    if count < 2 or not math.isfinite(mean):
        return Interval(mean, math.nan, math.nan)
    residuals = sums[:, 0] - sizes * mean
    error = math.sqrt(count / (count - 1) * float(residuals @ residuals)) / total
    half = student_quantile(0.5 + level / 2, count - 1) * error
    return Interval(mean, mean - half, mean + half)


def prompt_scores(prompts: Sequence[PromptScores], score: str, pass_threshold: float) -> np.ndarray:
    """[P] one number per prompt.

    Args:
        score: `mean_reward` (mean over the samples), `pass_at_1` (share of samples that pass), `greedy_reward`,
            `greedy_pass` (0 or 1).
        pass_threshold: a response passes when its reward is at least this.
    Raises:
        ValueError: unknown score, or a sampled score of a prompt without samples.
    """
    if score not in SCORES:
        raise ValueError(f"score {score!r} is not one of {', '.join(SCORES)}")
    if score == "greedy_reward":
        return np.array([p.greedy for p in prompts], dtype=float)
    if score == "greedy_pass":
        return np.array([_passes(p.greedy, pass_threshold) for p in prompts], dtype=float)
    empty = [p.id for p in prompts if not p.sampled]
    if empty:
        raise ValueError(f"{score}: prompt {empty[0]} has no sampled responses")
    if score == "mean_reward":
        return np.array([np.mean(p.sampled) for p in prompts], dtype=float)
    return np.array([np.mean([_passes(r, pass_threshold) for r in p.sampled]) for p in prompts], dtype=float)


def summarise(prompts: Sequence[PromptScores], pass_threshold: float) -> dict[str, float]:
    """The metrics of an evaluation.

    Returns:
        Every score of SCORES (the sampled ones when there are samples) with `_low` and `_high` (95 % over prompts),
        `response_tokens` (mean), `format_error_share`, `num_prompts`, and `task/<task>/<score>`.
    Raises:
        ValueError: no prompts.
    """
    if not prompts:
        raise ValueError("no prompts to summarise")
    scores = SCORES if all(p.sampled for p in prompts) else SCORES[2:]
    tasks = np.array([p.task for p in prompts])
    metrics: dict[str, float] = {}
    for score in scores:
        values = prompt_scores(prompts, score, pass_threshold)
        interval = mean_interval(values, clusters=cluster_labels(prompts))
        metrics |= {score: interval.mean, f"{score}_low": interval.low, f"{score}_high": interval.high}
        metrics |= {f"task/{task}/{score}": float(values[tasks == task].mean()) for task in sorted(set(tasks))}
    lengths = [n for p in prompts for n in p.lengths]
    if lengths:
        metrics["response_tokens"] = float(np.mean(lengths))
    metrics["format_error_share"] = sum(p.format_errors for p in prompts) / sum(1 + len(p.sampled) for p in prompts)
    metrics["num_prompts"] = float(len(prompts))
    return metrics


def cluster_labels(prompts: Sequence[PromptScores]) -> list[str]:
    """[P] the cluster of each prompt; a prompt without one is its own."""
    return [f"cluster:{p.cluster}" if p.cluster else f"prompt:{p.id}" for p in prompts]


def paired_tests(differences: np.ndarray, margins: Sequence[float], test: PairedTest,
                 clusters: Sequence[str] | None = None) -> list[PairedResult]:
    """Test K sets of paired differences by bootstrap and by the exact sign test.

    The bootstrap resamples clusters and takes percentiles, widened so that few clusters keep the level: Hesterberg,
    What Teachers Should Know About the Bootstrap (arXiv:1411.5279), sec. 5.3. Where few differences are not zero the
    bootstrap is too sure; the sign test (McNemar's exact test for binary scores) is exact there.

    Args:
        differences: [P, K] score of B minus score of A.
        margins: [K] the bootstrap's hypothesis is difference <= margin.
        clusters: [P] labels of prompts that depend on one another.
    Raises:
        ValueError: fewer than two clusters, or a difference that is not finite.
    """
    if not np.isfinite(differences).all():
        raise ValueError(f"{int((~np.isfinite(differences)).sum())} paired differences are not finite")
    sums, sizes = _cluster_sums(differences, clusters)
    count = len(sizes)
    if count < 2:
        raise ValueError(f"{count} independent prompts: a paired test needs at least 2")
    means = _resampled_means(sums, sizes, test)
    widen = math.sqrt(count / (count - 1))
    tail = NormalDist().cdf(-widen * student_quantile(1 - test.alpha, count - 1))
    low, high = np.quantile(means, [tail, 1 - tail], axis=0)
    below = ((means <= np.asarray(margins) + NOISE).sum(axis=0) + 1) / (test.resamples + 2)
    wins, losses = (sums > NOISE).sum(axis=0), (sums < -NOISE).sum(axis=0)
    return [PairedResult(
        difference=float(sums[:, k].sum() / sizes.sum()), low=float(low[k]), high=float(high[k]),
        p_bootstrap=1 - student_cdf(-NormalDist().inv_cdf(float(below[k])) / widen, count - 1),
        p_sign=sign_test(int(wins[k]), int(losses[k])), wins=int(wins[k]), losses=int(losses[k]),
    ) for k in range(differences.shape[1])]


def sign_test(wins: int, losses: int) -> float:
    """Exact one-sided p-value: probability of at least `wins` heads in wins + losses tosses of a fair coin."""
    return float(_binomial_tails(wins + losses)[wins])


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values of Holm's step-down method: rejecting those <= alpha keeps the family-wise level alpha.

    Source: Holm (1979), A simple sequentially rejective multiple test procedure.
    """
    order = np.argsort(p_values, kind="stable")
    adjusted = [0.0] * len(order)
    running = 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, (len(order) - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted


def detectable_difference(differences: np.ndarray, *, margin: float, alpha: float, power: float,
                          clusters: Sequence[str] | None = None) -> float:
    """The smallest rise that `paired_tests` would find with probability `power` on such a prompt set.

    Alternatives are the exponential tilts of the observed differences made symmetric: for 0/1 scores that is flipping
    more changed prompts to wins, for normal differences it is a shift. The mean and the wins are drawn jointly from
    their normal approximation with the tilt's moments.

    Args:
        differences: [P] of a comparison on this set, whatever its outcome; their spread and ties are what counts.
    Returns:
        Units of the score; infinity when no rise of this kind would be found (too few prompts change at all).
    """
    sums, sizes = _cluster_sums(np.asarray(differences, dtype=float)[:, None], clusters)
    sizes_of_changed = np.abs(sums[:, 0] / sizes)
    changed = sizes_of_changed[sizes_of_changed > NOISE]
    if not len(changed) or len(sizes) < 2:
        return math.inf
    trial = _Trial(len(sizes), changed, margin, alpha)
    weakest, strongest = 0.0, 200.0
    if trial.power(strongest) < power:
        return math.inf
    for _ in range(40):
        middle = (weakest + strongest) / 2
        weakest, strongest = (middle, strongest) if trial.power(middle) < power else (weakest, middle)
    return trial.rise(strongest)


class _Trial:
    """A comparison of `count` prompts of which those in `changed` differ; its true rise is set by a tilt."""

    def __init__(self, count: int, changed: np.ndarray, margin: float, alpha: float) -> None:
        self.count, self.margin, self.scale = count, margin, changed.max()
        self.sizes = changed / self.scale
        self.share = len(changed) / count
        self.critical = student_quantile(1 - alpha, count - 1)
        self.needed_wins = int(np.argmax(_binomial_tails(len(changed)) <= alpha)) if (
            _binomial_tails(len(changed))[-1] <= alpha) else len(changed) + 1
        self.noise = np.random.default_rng(0).standard_normal((2, 20_000))

    def _moments(self, tilt: float) -> tuple[float, float, float, float]:
        """Mean of a changed prompt's difference, of its square, probability of a win, mean of difference x win."""
        ups, downs = np.exp(tilt * (self.sizes - 1)), np.exp(-tilt * (self.sizes + 1))
        total = (ups + downs).sum()
        return (float(self.sizes @ (ups - downs) / total), float(self.sizes**2 @ (ups + downs) / total),
                float(ups.sum() / total), float(self.sizes @ ups / total))

    def rise(self, tilt: float) -> float:
        """Mean difference over all prompts under the tilt, in units of the score."""
        return float(self.share * self._moments(tilt)[0] * self.scale)

    def power(self, tilt: float) -> float:
        """Probability that both tests reject."""
        mean, square, win, mean_of_wins = self._moments(tilt)
        num_changed, rise = self.share * self.count, self.share * mean
        error = math.sqrt(max(self.share * square - rise**2, 0.0) / self.count)
        spread = math.sqrt(max((square - mean**2) * win * (1 - win), 1e-300))
        correlation = float(np.clip((mean_of_wins - mean * win) / spread, -1, 1))
        sizes, others = self.noise
        wins = np.round(num_changed * win + math.sqrt(num_changed * win * (1 - win)) * (
            correlation * sizes + math.sqrt(1 - correlation**2) * others))
        enough = rise + error * sizes - self.margin / self.scale > self.critical * error
        return float(np.mean(enough & (wins >= self.needed_wins)))


def _passes(reward: float, threshold: float) -> float:
    return math.nan if math.isnan(reward) else float(reward >= threshold - NOISE)


def _cluster_sums(values: np.ndarray, clusters: Sequence[str] | None) -> tuple[np.ndarray, np.ndarray]:
    """[P, K] values -> [C, K] sums and [C] sizes."""
    if not len(values):
        raise ValueError("no values")
    if clusters is None:
        return values, np.ones(len(values))
    _, index = np.unique(np.asarray(clusters), return_inverse=True)
    sums = np.zeros((index.max() + 1, values.shape[1]))
    np.add.at(sums, index, values)
    return sums, np.bincount(index).astype(float)


def _resampled_means(sums: np.ndarray, sizes: np.ndarray, test: PairedTest) -> np.ndarray:
    """[R, K] means of resampled clusters; the same resamples for all K, drawn in blocks of bounded memory."""
    count = len(sizes)
    rng = np.random.default_rng(test.seed)
    block = max(1, 2_000_000 // count)
    means = np.empty((test.resamples, sums.shape[1]))
    for start in range(0, test.resamples, block):
        rows = min(block, test.resamples - start)
        drawn = rng.integers(0, count, (rows, count)) + count * np.arange(rows)[:, None]
        times = np.bincount(drawn.ravel(), minlength=rows * count).reshape(rows, count).astype(float)
        means[start : start + rows] = (times @ sums) / (times @ sizes)[:, None]
    return means


@lru_cache(maxsize=256)
def _binomial_tails(tosses: int) -> np.ndarray:
    """[tosses + 1] P(heads >= k) of a fair coin."""
    log_factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, tosses + 1)))])
    log_mass = log_factorials[-1] - log_factorials - log_factorials[::-1] - tosses * math.log(2)
    return np.minimum(np.cumsum(np.exp(log_mass)[::-1])[::-1], 1.0)


_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(96)


def student_cdf(value: float, dof: int) -> float:
    """P(T <= value) of Student's t, by quadrature of cos^(dof-1) after value = sqrt(dof) tan(angle)."""
    angle = math.atan(value / math.sqrt(dof))
    # Beyond 40 / sqrt(dof) the integrand is nothing; without the cut the nodes would miss the peak of a large dof.
    angle = math.copysign(min(abs(angle), 40 / math.sqrt(dof)), angle)
    area = angle / 2 * float(_WEIGHTS @ np.cos(angle / 2 * (_NODES + 1)) ** (dof - 1))
    log_whole = 0.5 * math.log(math.pi) + math.lgamma(dof / 2) - math.lgamma((dof + 1) / 2)
    return min(1.0, max(0.0, 0.5 + area * math.exp(-log_whole)))


def student_quantile(probability: float, dof: int) -> float:
    """Inverse of `student_cdf` for 0.5 <= probability < 1, by bisection."""
    low, high = 0.0, 2.0
    while student_cdf(high, dof) < probability:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, dof) < probability else (low, middle)
    return high
