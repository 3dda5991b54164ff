"""The plugin's HTML: the card of a run, the table of a gate, and a report with that table in it. Pure functions."""

import base64
import hashlib
import html
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.spec.report import GATE_SLOT, VERDICT_SLOT
from engine.statistics import SCORES


@dataclass(frozen=True)
class Card:
    """What is known of a run now."""

    title: str
    links: Mapping[str, str] = field(default_factory=dict)
    """Label to address; only http(s) addresses and paths become links."""
    facts: Mapping[str, str] = field(default_factory=dict)
    models: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Metrics of the evaluation by model, in the order of the columns."""
    said: tuple[str, ...] = ()
    """What tasks said of the result or of their failure, Markdown."""
    verdict: Mapping[str, Any] | None = None
    """`GateResult.to_dict()`; None before the review has judged."""


def page(card: Card) -> str:
    """The card as a document."""
    title = html.escape(card.title)
    parts = [_facts(card.facts), _links(card.links), _said(card.said), _scores(card.models)]
    if card.verdict is not None:
        parts.append(gate_section(card.verdict))
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body>'
            f"<h1>{title}</h1>{badge(card.verdict)}{''.join(parts)}<script>{SCRIPT}</script></body></html>\n")


def badge(verdict: Mapping[str, Any] | None) -> str:
    """`gate passed` or `gate failed`; nothing before the review."""
    if verdict is None:
        return ""
    look, word = ("good", "passed") if verdict["passed"] else ("bad", "failed")
    return f'<span class="badge {look}">gate {word}</span>'


def gate_section(verdict: Mapping[str, Any]) -> str:
    """The gate's reasons and its table, as a section that fits the report and the card."""
    reasons = "".join(f"<li>{html.escape(str(reason))}</li>" for reason in verdict["reasons"])
    rows = "".join(
        f'<tr><td class="{"good" if row["passed"] else "bad"}">{"✓" if row["passed"] else "✗"}</td>'
        f'<th scope="row">{html.escape(str(row["check"]))}</th><td>{_cell(row["champion"])}</td>'
        f'<td>{_cell(row["candidate"])}</td><td class="words">{html.escape(str(row["evidence"]))}</td></tr>'
        for row in verdict["table"])
    head = '<th></th><th></th><th>champion</th><th>candidate</th><th class="words">evidence</th>'
    return f'<section class="card"><h2>Gate</h2><ul>{reasons}</ul>{_table(head, rows)}</section>'


def with_gate(report: str, verdict: Mapping[str, Any]) -> str:
    """A report's page with the verdict in its places; what an earlier review put there is replaced."""
    for (begin, end), content in ((VERDICT_SLOT, badge(verdict)), (GATE_SLOT, gate_section(verdict))):
        before, found, rest = report.partition(begin)
        _, closed, after = rest.partition(end)
        if found and closed:
            report = before + begin + content + end + after
    return report


def _facts(facts: Mapping[str, str]) -> str:
    items = "".join(f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd></div>"
                    for name, text in facts.items() if text)
    return f'<dl class="facts">{items}</dl>' if items else ""


def _links(links: Mapping[str, str]) -> str:
    items = "".join(f'<a class="button" href="{html.escape(address)}">{html.escape(label)}</a>'
                    for label, address in links.items() if address.startswith(("http://", "https://", "/")))
    return f"<nav>{items}</nav>" if items else ""


def _said(said: Iterable[str]) -> str:
    return "".join(f'<p class="said">{html.escape(_plain(sentence))}</p>' for sentence in said)


def _plain(markdown: str) -> str:
    """Without what our own sentences use of Markdown: code, bold, and links, which the card has as buttons."""
    return re.sub(r"\[[^\]]*\]\([^)]*\)(, )?", "", markdown).replace("**", "").replace("`", "").strip()


def _scores(models: Mapping[str, Mapping[str, float]]) -> str:
    names = [name for name in (*SCORES, "response_tokens", "format_error_share")
             if any(name in metrics for metrics in models.values())]
    if not names:
        return ""
    head = "<th></th>" + "".join(f"<th>{html.escape(model)}</th>" for model in models)
    rows = "".join(f'<tr><th scope="row">{name.replace("_", " ")}</th>'
                   + "".join(f"<td>{_score(metrics, name)}</td>" for metrics in models.values()) + "</tr>"
                   for name in names)
    return f'<section class="card"><h2>On held-out prompts</h2>{_table(head, rows)}</section>'


def _score(metrics: Mapping[str, float], name: str) -> str:
    low, high = metrics.get(f"{name}_low"), metrics.get(f"{name}_high")
    interval = "" if low is None or high is None else f' <span class="muted">[{low:.3g}, {high:.3g}]</span>'
    return f"{_cell(metrics.get(name))}{interval}"


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else html.escape(str(value))


def _table(head: str, rows: str) -> str:
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


# Airflow shows a tab in a frame that may open nothing, so a link is followed by the page around it. The page around it
# also knows the theme that was chosen in Airflow.
SCRIPT = """
if (parent !== window) {
  addEventListener('click', event => {
    const link = event.target.closest('a');
    if (!link) return;
    event.preventDefault();
    const outside = parent.document.createElement('a');
    Object.assign(outside, {href: link.href, target: '_blank', rel: 'noopener'});
    outside.click();
  });
  const root = parent.document.documentElement;
  const follow = () => {
    const theme = ['dark', 'light'].find(name => root.classList.contains(name));
    if (theme) document.documentElement.style.colorScheme = theme;
  };
  new MutationObserver(follow).observe(root, {attributes: true});
  follow();
}
"""
SCRIPT_HASH = "sha256-" + base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
"""For the Content-Security-Policy: this script and no other."""
STYLE = """
:root{color-scheme:light dark;--page:light-dark(#fff,#161d2d);--ink:light-dark(#1b2330,#e6eaf0);
--muted:light-dark(#5d6878,#95a1b3);--rule:light-dark(#e3e7ed,#2a3240);--accent:light-dark(#2563eb,#6ea8fe);
--good:light-dark(#15803d,#4ade80);--bad:light-dark(#b91c1c,#f87171)}
*{box-sizing:border-box}
body{margin:0;padding:20px;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
h1{display:inline-block;font-size:22px;margin:0 12px 0 0}h2{font-size:16px;margin:0 0 8px}
.muted,dt{color:var(--muted)}.good{color:var(--good)}.bad{color:var(--bad)}
.badge{padding:2px 10px;border:1px solid currentColor;border-radius:999px;font-size:13px;font-weight:600}
.facts{display:flex;flex-wrap:wrap;gap:6px 28px;margin:14px 0}dt{font-size:12px}dd{margin:0;overflow-wrap:anywhere}
nav{display:flex;flex-wrap:wrap;gap:10px;margin:14px 0}
.button{padding:5px 14px;border:1px solid var(--accent);border-radius:8px;color:var(--accent);text-decoration:none}
.said{white-space:pre-wrap;overflow-wrap:anywhere;border-left:3px solid var(--accent);padding-left:12px}
.card{border:1px solid var(--rule);border-radius:10px;padding:16px 18px;margin:14px 0}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:6px 12px;border-bottom:1px solid var(--rule);text-align:right;white-space:nowrap}
thead th{color:var(--muted);font-size:12px}tbody th{text-align:left;font-weight:500}tr:last-child>*{border-bottom:0}
.words{text-align:left;white-space:normal;min-width:260px}
"""
