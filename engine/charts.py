"""Charts of a run's metrics: matplotlib figures as PNG for files and as SVG that follows the page's colours."""

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

Series = Mapping[str, np.ndarray]
"""Metric name to [N] values by iteration; NaN where an iteration did not log it."""
MAX_POINTS = 320
"""Points of a drawn line; more are averaged in bins."""
TITLE_INCHES, LEGEND_INCHES = 0.36, 0.24
"""Height of the title, which the page says itself and the SVG leaves out, and of the legend above a chart."""
COLOURS = {"#1b2330": "--ink", "#5d6878": "--muted", "#e3e7ed": "--rule", "#2563eb": "--accent", "#d97706": "--second"}
"""Colours of the PNG, and the variables of the page that replace them in the SVG."""
INK, MUTED, RULE, ACCENT, SECOND = COLOURS
PHASE_COLOURS = ("#4c78a8", "#f2a541", "#59a89c", "#e0626b", "#8f76b8", "#9c755f", "#b6bcc6", "#76b041", "#d37295")


@dataclass(frozen=True)
class Chart:
    """One drawn chart."""

    name: str
    """File name without ending."""
    title: str
    caption: str
    png: Path
    wide: bool = False
    """Takes the whole width of the page."""
    svg: str = ""


@dataclass(frozen=True)
class LineChart:
    """What a chart of lines shows; it is drawn when the first of its metrics was logged."""

    name: str
    title: str
    unit: str
    """Label of the y axis."""
    metrics: tuple[tuple[str, str], ...]
    """(metric, label in the legend)."""
    caption: str
    from_zero: bool = False


LINE_CHARTS = (
    LineChart("kl", "KL to the reference", "nats per token", (("actor/kl_to_reference", "KL to reference"),),
              "How far the policy has moved from the model it started from.", from_zero=True),
    LineChart("response_length", "Response length", "tokens",
              (("rollout/response_tokens_mean", "mean"), ("rollout/response_tokens_max", "longest")),
              "Tokens of the sampled responses.", from_zero=True),
    LineChart("throughput", "Throughput", "samples per second", (("time/samples_per_s", "samples/s"),),
              "Prompts answered, scored and trained on, per second of a whole iteration.", from_zero=True),
    LineChart("generation", "Generation", "tokens per second", (("rollout/tokens_per_s", "tokens/s"),),
              "Tokens sampled per second of generating.", from_zero=True),
    LineChart("entropy", "Policy entropy", "nats per token", (("actor/entropy", "entropy"),),
              "Falls when the policy becomes sure of its tokens.", from_zero=True),
    LineChart("gradient", "Gradient norm", "norm before clipping",
              (("actor/grad_norm", "actor"), ("critic/grad_norm", "critic")), "Global norm of the gradients.",
              from_zero=True),
)


def draw_all(steps: np.ndarray, series: Series, stage_starts: Sequence[int], out_dir: Path) -> list[Chart]:
    """Draw every chart whose metrics are there; PNGs go to `out_dir`.

    Args:
        steps: [N] iteration numbers.
        stage_starts: first iteration of each stage but the first; marked by a vertical line.
    """
    drawn = []
    if _has(series, "reward/mean"):
        drawn.append(_reward(steps, series, stage_starts, out_dir))
    phases = [name for name in series if is_phase(name) and _has(series, name)]
    drawn += [_lines(spec, steps, series, stage_starts, out_dir) for spec in LINE_CHARTS[:2] if _shows(spec, series)]
    if phases:
        drawn.append(_phases(steps, series, phases, stage_starts, out_dir))
    drawn += [_lines(spec, steps, series, stage_starts, out_dir) for spec in LINE_CHARTS[2:] if _shows(spec, series)]
    return drawn


def downsample(steps: np.ndarray, values: np.ndarray, max_points: int = MAX_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Means of consecutive bins, at most `max_points` of them; NaN values do not count.

    Args:
        steps, values: [N].
    Returns:
        ([M], [M]) with M <= min(N, max_points); bins without a value are left out.
    """
    kept = np.isfinite(values)
    steps, values = steps[kept], values[kept]
    if len(values) <= max_points:
        return steps.astype(float), values
    edges = np.linspace(0, len(values), max_points + 1).astype(int)[:-1]
    sizes = np.diff(np.append(edges, len(values)))
    return np.add.reduceat(steps.astype(float), edges) / sizes, np.add.reduceat(values, edges) / sizes


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Centred moving mean over `width` points, of those there are at the ends; [M] -> [M]."""
    if width < 2 or len(values) < 3:
        return values
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    first, past = np.maximum(index - width // 2, 0), np.minimum(index + width // 2 + 1, len(values))
    return (sums[past] - sums[first]) / (past - first)


def is_phase(name: str) -> bool:
    """Whether a metric is the seconds of one phase of an iteration."""
    return name.startswith("time/") and name.endswith("_s") and name not in ("time/iteration_s", "time/samples_per_s")


def _has(series: Series, name: str) -> bool:
    return name in series and bool(np.isfinite(series[name]).any())


def _shows(spec: LineChart, series: Series) -> bool:
    return any(_has(series, name) for name, _ in spec.metrics)


def _reward(steps: np.ndarray, series: Series, stage_starts: Sequence[int], out_dir: Path) -> Chart:
    figure, axes = _axes("reward", wide=True)
    mean = series["reward/mean"]
    x, y = downsample(steps, mean)
    curve = smooth(y, max(3, len(y) // 15))
    caption = "Mean reward of each iteration's samples (thin) and its moving mean (thick)."
    if all(_has(series, name) for name in ("reward/std", "time/samples_per_s", "time/iteration_s")):
        samples = np.maximum(series["time/samples_per_s"] * series["time/iteration_s"], 1)
        error = 1.96 * series["reward/std"] / np.sqrt(samples)
        both = np.isfinite(error) & np.isfinite(mean)
        at, half = downsample(steps[both], error[both])
        _, centre = downsample(steps[both], mean[both])
        axes.fill_between(at, centre - half, centre + half, color=ACCENT, alpha=0.16, linewidth=0)
        caption += " The band is the 95 % interval of an iteration's mean."
    axes.plot(x, y, color=ACCENT, alpha=0.45, linewidth=0.9, marker="o" if len(x) == 1 else None)
    axes.plot(x, curve, color=ACCENT, linewidth=2.2)
    return _finish(figure, axes, Chart("reward", "Reward while training", caption, out_dir / "reward.png", wide=True),
                   steps, stage_starts)


def _lines(spec: LineChart, steps: np.ndarray, series: Series, stage_starts: Sequence[int], out_dir: Path) -> Chart:
    present = [(name, label) for name, label in spec.metrics if _has(series, name)]
    figure, axes = _axes(spec.unit, legend=len(present) > 1)
    for (name, label), colour in zip(present, (ACCENT, SECOND), strict=False):
        x, y = downsample(steps, series[name])
        axes.plot(x, y, color=colour, alpha=0.4, linewidth=0.9, marker="o" if len(x) == 1 else None)
        axes.plot(x, smooth(y, max(3, len(y) // 15)), color=colour, linewidth=2, label=label)
    if len(present) > 1:
        _legend(axes, columns=len(present))
    if spec.from_zero and axes.get_ylim()[0] >= 0:
        axes.set_ylim(bottom=0)
    return _finish(figure, axes, Chart(spec.name, spec.title, spec.caption, out_dir / f"{spec.name}.png"),
                   steps, stage_starts)


def _phases(steps: np.ndarray, series: Series, phases: list[str], stage_starts: Sequence[int], out_dir: Path) -> Chart:
    figure, axes = _axes("seconds per iteration", wide=True, legend=True)
    phases = sorted(phases, key=lambda name: -float(np.nansum(series[name])))
    columns = [downsample(steps, np.nan_to_num(series[name]), 120) for name in phases]
    x, heights = columns[0][0], np.stack([values for _, values in columns])
    labels = [f"{name[5:-2].replace('_', ' ')} {np.nanmean(series[name]):.3g} s" for name in phases]
    colours = [PHASE_COLOURS[i % len(PHASE_COLOURS)] for i in range(len(phases))]
    middles = (x[:-1] + x[1:]) / 2
    edges = np.concatenate([[x[0] - 0.5], middles, [x[-1] + 0.5]])
    floor = np.zeros(len(x))
    for row, label, colour in zip(heights, labels, colours, strict=True):
        axes.stairs(floor + row, edges, baseline=floor, fill=True, color=colour, label=label, linewidth=0)
        floor = floor + row
    _legend(axes, columns=len(phases))
    axes.set_ylim(0, 1.12 * float(floor.max()) or 1.0)
    caption = "Where an iteration's time goes; the legend gives each phase's mean."
    return _finish(figure, axes, Chart("phases", "Time per phase", caption, out_dir / "phases.png", wide=True),
                   steps, stage_starts)


def _axes(unit: str, wide: bool = False, legend: bool = False) -> tuple[Any, Any]:
    import matplotlib

    # A figure without pyplot: no display, no global state, nothing to close.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    style: dict[Any, Any] = {"font.size": 9, "axes.edgecolor": MUTED, "axes.labelcolor": MUTED, "xtick.color": MUTED,
             "ytick.color": MUTED, "text.color": INK, "axes.spines.top": False, "axes.spines.right": False,
             "axes.spines.left": False, "ytick.left": False}
    with matplotlib.rc_context(style):
        width, inside = (9.6, 2.6) if wide else (5.6, 2.2)
        height = 0.46 + inside + 0.06 + LEGEND_INCHES * legend + TITLE_INCHES
        figure = Figure(figsize=(width, height))
        # Margins in inches; matplotlib's own layout engines cost more than the drawing.
        axes = figure.add_axes((0.66 / width, 0.46 / height, 1 - 0.78 / width, inside / height))
        axes.set_ylabel(unit)
        axes.set_xlabel("iteration")
        axes.grid(axis="y", color=RULE, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))
    return figure, axes


def _legend(axes: Any, columns: int) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, frameon=False, fontsize=8.5, labelcolor=MUTED,
                borderaxespad=0.3, borderpad=0, handlelength=1.2, columnspacing=1.4)


def _finish(figure: Any, axes: Any, chart: Chart, steps: np.ndarray, stage_starts: Sequence[int]) -> Chart:
    import matplotlib

    if len(steps) > 1:
        span = float(steps[-1] - steps[0])
        axes.set_xlim(steps[0] - 0.012 * span, steps[-1] + 0.012 * span)
    for number, start in enumerate(stage_starts, start=2):
        axes.axvline(start - 0.5, color=MUTED, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.annotate(f"stage {number}", (start - 0.5, 1), xycoords=("data", "axes fraction"), xytext=(3, -9),
                      textcoords="offset points", color=MUTED, fontsize=8)
    left = axes.get_position().x0
    figure.text(left, 1 - 0.1 / figure.get_figheight(), chart.title, color=INK, fontsize=11, weight="bold", va="top")
    figure.savefig(chart.png, dpi=150, facecolor="white")
    figure.texts[-1].remove()
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": chart.name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return replace(chart, svg=themed(buffer.getvalue(), chart))


def themed(svg: str, chart: Chart) -> str:
    """A whole SVG file as an element for a page: without prologue and size, colours as the page's variables."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for size in ("width", "height"):
        svg = re.sub(rf'(<svg[^>]*?) {size}="[^"]*"', r"\1", svg, count=1)
    # The title's strip is empty here.
    svg = re.sub(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', lambda box: (
        f'viewBox="0 {72 * TITLE_INCHES:g} {box[1]} {float(box[2]) - 72 * TITLE_INCHES:g}"'), svg, count=1)
    for colour, variable in COLOURS.items():
        svg = svg.replace(colour, f"var({variable})")
    # Several charts stand in one page: an id may occur once.
    svg = re.sub(r'id="', f'id="{chart.name}-', svg)
    svg = re.sub(r'(xlink:href="|url\()#', rf"\1#{chart.name}-", svg)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{chart.title}" ', 1).strip()


def number(value: float) -> str:
    """A metric for people: about three digits that count, no exponent where it can be avoided."""
    if not math.isfinite(value):
        return "n/a"
    size = abs(value)
    if size >= 1:
        return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"
    return f"{value:.3f}" if size >= 0.01 or value == 0 else f"{value:.2g}"
