"""The report's page: HTML from what a run's files say, in light and dark, with nothing fetched from elsewhere."""

import html
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from engine.charts import Chart, number
from engine.spec.evaluation import Pair
from engine.spec.report import GATE_SLOT, VERDICT_SLOT, ReportSpec


@dataclass(frozen=True)
class Metrics:
    """What the iterations of a run logged."""

    steps: np.ndarray
    """[N] iteration numbers, rising."""
    times: np.ndarray
    """[N] seconds since the epoch."""
    series: dict[str, np.ndarray]
    """Metric name to [N] values; NaN where an iteration has none."""
    stage_starts: list[int]
    """First iteration of each stage but the first."""


@dataclass(frozen=True)
class Row:
    """One metric of the evaluation, before and after."""

    name: str
    before: float
    after: float
    change_low: float | None = None
    """95 % interval of the change, paired by prompt; None where the metric is not a mean over prompts."""
    change_high: float | None = None


@dataclass(frozen=True)
class StageCost:
    """What one stage took."""

    name: str
    seconds: float
    gpu_seconds: float
    cost: float | None


@dataclass(frozen=True)
class Content:
    """Everything on the page."""

    spec: ReportSpec
    metrics: Metrics
    charts: list[Chart]
    rows: list[Row]
    pairs: list[Pair]
    stages: list[StageCost]


SHARES = ("pass_at_1", "greedy_pass", "format_error_share")
"""Metrics shown in per cent."""
LOWER_IS_BETTER = ("format_error_share",)
NEUTRAL = ("response_tokens",)
TITLES = {"mean_reward": "Mean reward, sampled", "pass_at_1": "pass@1, sampled", "greedy_reward": "Mean reward, greedy",
          "greedy_pass": "Passed, greedy", "response_tokens": "Response length (tokens)",
          "format_error_share": "Format errors"}
KINDS = {"gained": "Gained most", "lost": "Lost most", "changed": "Other words, same score"}


def page(content: Content) -> str:
    """The whole document."""
    sections = [
        _tiles(content), _charts(content.charts), _comparison(content), "".join(GATE_SLOT), _pairs(content.pairs),
        _stages(content.stages)]
    title = html.escape(content.spec.title)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>\n<body>'
        f"<header><h1>{title}</h1>{''.join(VERDICT_SLOT)}{_facts(content.spec.facts)}</header>\n<main>"
        + "\n".join(section for section in sections if section)
        + "</main>\n<footer>Ratchet report. Intervals are 95 %, over prompts; changes are paired prompt by prompt. "
          "A rank is a GPU where there are any.</footer></body></html>\n")


def _facts(facts: dict[str, str]) -> str:
    if not facts:
        return ""
    items = "".join(f"<div><dt>{html.escape(key)}</dt><dd>{_linked(value)}</dd></div>" for key, value in facts.items())
    return f'<dl class="facts">{items}</dl>'


def _linked(value: str) -> str:
    text = html.escape(value)
    return f'<a href="{text}">{text}</a>' if value.startswith(("http://", "https://")) else text


def _tiles(content: Content) -> str:
    metrics, tiles = content.metrics, []
    scores = {row.name: row for row in content.rows}
    for name in ("mean_reward", "greedy_pass"):
        if name in scores:
            row = scores[name]
            change = f'<span class="{_verdict(row)}">{_signed(row, row.after - row.before)}</span> {_interval(row)}'
            ends = f"{_value(name, row.before)} → {_value(name, row.after)}"
            tiles.append((f"{TITLES[name]}, held out", ends, change))
    rewards = metrics.series.get("reward/mean")
    if rewards is not None and np.isfinite(rewards).any():
        few = max(1, len(rewards) // 10)
        tiles.append(("Reward while training", f"{number(_mean(rewards[:few]))} → {number(_mean(rewards[-few:]))}",
                      f"mean of the first and last {few} iterations" if few > 1 else "first and last iteration"))
    tiles.append(("Iterations", f"{len(metrics.steps):,}", f"{len(metrics.stage_starts) + 1} stage"
                  f"{'s' if metrics.stage_starts else ''}, up to policy version {int(metrics.steps[-1]):,}"))
    seconds = metrics.series.get("time/iteration_s")
    if seconds is not None:
        speed = metrics.series.get("time/samples_per_s")
        note = f"{number(_mean(seconds))} s an iteration" + (
            f", {number(_mean(speed))} samples/s" if speed is not None else "")
        tiles.append(("Time in iterations", duration(float(np.nansum(seconds))), note))
    cells = "".join(f'<div class="tile"><h3>{html.escape(name)}</h3><p class="big">{value}</p><p>{note}</p></div>'
                    for name, value, note in tiles)
    return f'<section class="tiles">{cells}</section>'


def _charts(charts: list[Chart]) -> str:
    figures = "".join(
        f'<figure class="card{" wide" if chart.wide else ""}"><h2>{html.escape(chart.title)}</h2>{chart.svg}'
        f"<figcaption>{html.escape(chart.caption)}</figcaption></figure>" for chart in charts)
    return f'<section class="charts">{figures}</section>' if charts else ""


def _comparison(content: Content) -> str:
    if not content.rows:
        return ""
    body = "".join(
        f'<tr><th scope="row">{html.escape(_title(row.name))}</th><td>{_value(row.name, row.before)}</td>'
        f'<td>{_value(row.name, row.after)}</td><td class="{_verdict(row)}">{_signed(row, row.after - row.before)}</td>'
        f'<td class="muted">{_interval(row)}</td></tr>' for row in content.rows)
    names = f"<th>{html.escape(content.spec.before)}</th><th>{html.escape(content.spec.after)}</th>"
    return _card("Before and after, on held-out prompts", _table(
        f"<th></th>{names}<th>change</th><th>95 % interval</th>", body))


def _pairs(pairs: list[Pair]) -> str:
    blocks = []
    for kind, title in KINDS.items():
        chosen = [pair for pair in pairs if pair.kind == kind]
        if chosen:
            blocks.append(f"<h3>{title}</h3>" + "".join(_pair(pair) for pair in chosen))
    return _card("Greedy answers before and after", "".join(blocks)) if blocks else ""


def _pair(pair: Pair) -> str:
    expected = html.escape(pair.after.answer)
    answer = f'<span class="muted">expected</span> <code>{expected}</code>' if expected else ""
    sides = "".join(
        f'<div><p class="muted">{side}, score {sample.score:g}, {sample.tokens} tokens</p>'
        f"<pre>{html.escape(sample.response)}</pre></div>"
        for side, sample in (("before", pair.before), ("after", pair.after)))
    return (f'<article><pre class="prompt">{html.escape(pair.after.prompt)}</pre><p>{answer} '
            f'<span class="muted">{html.escape(pair.after.task)}</span></p><div class="sides">{sides}</div></article>')


def _stages(stages: Iterable[StageCost]) -> str:
    stages = list(stages)
    if not stages:
        return ""
    priced = any(stage.cost is not None for stage in stages)
    total = StageCost("total", sum(s.seconds for s in stages), sum(s.gpu_seconds for s in stages),
                      sum(s.cost or 0.0 for s in stages) if priced else None)
    body = "".join(
        f'<tr{" class=total" if stage is total else ""}><th scope="row">{html.escape(stage.name)}</th>'
        f"<td>{duration(stage.seconds)}</td><td>{number(stage.gpu_seconds)}</td>"
        + (f"<td>{stage.cost or 0.0:,.2f}</td>" if priced else "") + "</tr>" for stage in [*stages, total])
    cost = "<th>cost</th>" if priced else ""
    return _card("Time and cost", _table(f"<th></th><th>time</th><th>rank-seconds</th>{cost}", body))


def _card(title: str, body: str) -> str:
    return f'<section class="card"><h2>{html.escape(title)}</h2>{body}</section>'


def _table(head: str, body: str) -> str:
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def duration(seconds: float) -> str:
    """`2 h 05 min`, `12 min 04 s` or `3.2 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _mean(values: np.ndarray) -> float:
    kept = values[np.isfinite(values)]
    return float(kept.mean()) if len(kept) else math.nan


def _base(name: str) -> str:
    return name.rsplit("/", 1)[-1]


def _title(name: str) -> str:
    title = TITLES.get(_base(name), _base(name).replace("_", " "))
    return f"{name.split('/')[1]}: {title}" if name.startswith("task/") else title


def _value(name: str, value: float) -> str:
    return f"{100 * value:.1f} %" if _base(name) in SHARES and math.isfinite(value) else number(value)


def _signed(row: Row, value: float) -> str:
    if not math.isfinite(value):
        return "n/a"
    shown = f"{abs(100 * value):.1f} points" if _base(row.name) in SHARES else number(abs(value))
    return f"{'+' if value > 0 else '−' if value < 0 else '±'}{shown}"


def _interval(row: Row) -> str:
    if row.change_low is None or row.change_high is None or not math.isfinite(row.change_low):
        return ""
    factor = 100 if _base(row.name) in SHARES else 1
    return f"[{_bound(factor * row.change_low)}, {_bound(factor * row.change_high)}]"


def _bound(value: float) -> str:
    return f"{'−' if value < 0 else '+'}{number(abs(value))}"


def _verdict(row: Row) -> str:
    """Class of a change: good or bad only where the interval excludes no change."""
    if row.change_low is None or row.change_high is None or _base(row.name) in NEUTRAL:
        return ""
    if row.change_low > 0:
        return "bad" if _base(row.name) in LOWER_IS_BETTER else "good"
    if row.change_high < 0:
        return "good" if _base(row.name) in LOWER_IS_BETTER else "bad"
    return ""


STYLE = """
:root{color-scheme:light dark;--page:#f5f6f8;--card:#fff;--ink:#1b2330;--muted:#5d6878;--rule:#e3e7ed;--accent:#2563eb;
--second:#d97706;--good:#15803d;--bad:#b91c1c;--code:#f2f4f7}
@media (prefers-color-scheme:dark){:root{--page:#0f131a;--card:#171d27;--ink:#e6eaf0;--muted:#95a1b3;--rule:#2a3240;
--accent:#6ea8fe;--second:#f0b154;--good:#4ade80;--bad:#f87171;--code:#10151d}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1180px;padding:28px 20px 48px;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
header{margin-bottom:20px}h1{display:inline-block;font-size:26px;line-height:1.25;margin:0 12px 0 0;
letter-spacing:-.01em}
h2{font-size:16px;margin:0 0 10px}h3{font-size:13px;margin:18px 0 8px;color:var(--muted);font-weight:600}
a{color:var(--accent)}.muted{color:var(--muted)}.good{color:var(--good)}.bad{color:var(--bad)}
.badge{display:inline-block;padding:2px 10px;border:1px solid currentColor;border-radius:999px;font-size:13px;
font-weight:600;vertical-align:4px}
.facts{display:flex;flex-wrap:wrap;gap:6px 28px;margin:14px 0 0}.facts dt{color:var(--muted);font-size:12px}
.facts dd{margin:0;overflow-wrap:anywhere}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(205px,1fr));gap:14px;margin-bottom:14px}
.tile,.card{background:var(--card);border:1px solid var(--rule);border-radius:10px}
.tile{padding:14px 16px}.tile h3{margin:0}.tile p{margin:0;font-size:13px;color:var(--muted)}
.tile .big{font-size:20px;font-weight:650;color:var(--ink);letter-spacing:-.01em;margin:2px 0;white-space:nowrap}
.tile .good{color:var(--good)}.tile .bad{color:var(--bad)}
.card{padding:18px 20px;margin:0 0 14px}
.charts{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:14px;margin-bottom:14px}
.charts .card{margin:0}.charts .wide{grid-column:1/-1}
@media (max-width:760px){.charts{grid-template-columns:minmax(0,1fr)}}
figure svg{display:block;width:100%;height:auto}figure svg text{font-family:inherit!important}
figcaption{color:var(--muted);font-size:13px;margin-top:6px}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:7px 12px;border-bottom:1px solid var(--rule);text-align:right;white-space:nowrap}
thead th{color:var(--muted);font-size:12px;font-weight:600}
tbody th{text-align:left;font-weight:500}tr>:first-child{padding-left:0}
tr:last-child>*{border-bottom:0}.total>*{border-top:1px solid var(--muted);font-weight:650}
.words{text-align:left;white-space:normal;min-width:300px}
article{border-top:1px solid var(--rule);padding:14px 0}article p{margin:6px 0}
pre{margin:0;padding:10px 12px;background:var(--code);border-radius:8px;white-space:pre-wrap;overflow-wrap:anywhere;
font:13px/1.45 ui-monospace,"SF Mono",Menlo,"DejaVu Sans Mono",monospace;max-height:22em;overflow-y:auto}
pre.prompt{background:none;padding:0;font-weight:600}
.sides{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:12px}
@media (max-width:760px){.sides{grid-template-columns:minmax(0,1fr)}}
footer{color:var(--muted);font-size:12px;margin-top:20px}
"""
