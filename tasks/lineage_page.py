"""What `python -m tasks.lineage` shows: as text, and as a page in light and dark that needs nothing else."""

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tasks.lineage import Job, LineageFile, Prompts, Sighting, Step

SHORT = 12
"""Digits of a hash that the text shows."""
HASH_DIGITS = 64
METRICS_SHOWN = ("reward/mean", "sft/loss", "reward_model/accuracy", "dpo/accuracy", "ipo/accuracy")
"""Beside every `mean_reward`."""


@dataclass(frozen=True)
class Chain:
    """A version and what it was trained from."""

    steps: "Sequence[Step]"

    def text(self) -> str:
        """For a terminal."""
        return "\n".join(line for step in self.steps for line in _step_lines(step))

    def html(self) -> str:
        """A whole document."""
        first = self.steps[0]
        return _page(f"Lineage of {first.label}", "\n".join(map(_step_section, self.steps)))


@dataclass(frozen=True)
class Sightings:
    """The models that saw a file."""

    file: str
    sha256: str
    found: "Sequence[Sighting]"

    def text(self) -> str:
        """For a terminal."""
        name = self.file if self.file.lower() == self.sha256 else f"{self.file} (sha256 {self.sha256})"
        if not self.found:
            return f"No registered model saw {name}."
        rows = [(s.label, s.state, s.how, s.run) for s in self.found]
        return "\n".join([f"{len(rows)} registered models saw {name}:", *_columns(rows)])

    def html(self) -> str:
        """A whole document."""
        rows = [(s.label, s.state, s.how, s.run) for s in self.found]
        body = _table(("model", "state", "how", "run"), rows) if rows else "<p>No registered model saw it.</p>"
        facts = _facts({"file": self.file, "sha256": self.sha256})
        return _page("Models that saw a file", f'<section class="card">{facts}{body}</section>')


def _step_lines(step: "Step") -> Iterable[str]:
    made = step.lineage
    yield f"{step.label}{f' ({step.state})' if step.state else ''}{f': {step.note}' if step.note else ''}"
    if made is None:
        return
    yield f"  weights   {made.weights_hash}  {made.export_uri}{_gone(step, made.export_uri)}"
    yield f"  run       {made.dag_id} {made.run_id}, preset {made.preset}: {made.run_uri}"
    yield f"  MLflow    {made.mlflow_url}"
    yield f"  code      {_code(made)}"
    yield f"  pipeline  {made.pipeline_sha256}"
    yield f"  prompts   {made.prompts.manifest_sha256}  {made.prompts.uri}{_gone(step, made.prompts.uri)}"
    for name, _, source, sha256 in _data_rows(made.prompts):
        yield f"    {name:16} {sha256 or '-' * 64}  {source}"
    for task, job in made.jobs.items():
        yield (f"  {task:24} {job.spec_sha256[:SHORT]}  policy {job.policy_version}  "
               f"{job.gpu_seconds / 3600:.2f} GPU-hours  {_few_metrics(job)}")
        for checkpoint in job.checkpoints:
            where = f"{checkpoint.uri}{_gone(step, checkpoint.uri)}"
            yield f"    step {checkpoint.step:<6} {checkpoint.manifest_sha256}  {where}"
    yield f"  trained from {made.base_version or made.base_model}"


def _step_section(step: "Step") -> str:
    made = step.lineage
    title = f"<h2>{_text(step.label)} <small>{_text(step.state)}</small></h2>"
    if made is None:
        return f'<section class="card">{title}<p>{_text(step.note)}</p></section>'
    facts = _facts({
        "weights": made.weights_hash, "export": made.export_uri + _gone(step, made.export_uri),
        "run": f"{made.dag_id} {made.run_id}, preset {made.preset}", "files": made.run_uri, "MLflow": made.mlflow_url,
        "code": _code(made), "pipeline": made.pipeline_sha256,
        "prompts": made.prompts.uri + _gone(step, made.prompts.uri), "prompts manifest": made.prompts.manifest_sha256,
        "tokenizer": made.prompts.tokenizer_sha256, "trained from": made.base_version or made.base_model})
    data = _table(("set", "rows", "source", "sha256"), _data_rows(made.prompts))
    jobs = _table(("task", "spec", "policy version", "GPU-hours", "MLflow run"), [
        (task, job.spec_sha256, str(job.policy_version), f"{job.gpu_seconds / 3600:.2f}", job.mlflow_run_id)
        for task, job in made.jobs.items()])
    checkpoints = _table(("task", "step", "manifest", "where"), [
        (task, str(c.step), c.manifest_sha256, c.uri + _gone(step, c.uri))
        for task, job in made.jobs.items() for c in job.checkpoints])
    metrics = "".join(
        f"<details><summary>{_text(task)}: {len(job.metrics)} metrics</summary>"
        + _table(("metric", "value"), [(name, f"{value:.6g}") for name, value in job.metrics.items()]) + "</details>"
        for task, job in made.jobs.items() if job.metrics)
    return (f'<section class="card">{title}{facts}<h3>Data</h3>{data}<h3>Jobs</h3>{jobs}'
            f"<h3>Checkpoints at registration</h3>{checkpoints}<h3>Metrics at the end of each job</h3>{metrics}"
            "</section>")


def _data_rows(prompts: "Prompts") -> list[tuple[str, str, str, str]]:
    rows = []
    for name, made in prompts.sets.items():
        rows += [(name, f"{made.rows:,}", file.uri, file.sha256) for file in made.files]
        rows += [(name, f"{made.rows:,}", f"{source.get('kind', 'reasoning_gym')}:{source.get('task', '')}, seed "
                  f"{source.get('seed', 0)}, {source.get('size', '?')} rows", "") for source in made.generated]
    return rows


def _few_metrics(job: "Job") -> str:
    shown = [f"{name} {value:.4g}" for name, value in job.metrics.items()
             if name in METRICS_SHOWN or name.rsplit("/", 1)[-1] == "mean_reward"]
    return "  ".join([*shown[:3], f"({len(job.metrics)} metrics)"])


def _code(made: "LineageFile") -> str:
    return f"{made.code.version} {made.code.git_sha or 'no commit'}, sources {made.code.source_sha256}"


def _gone(step: "Step", uri: str) -> str:
    return "" if step.there.get(uri, True) else " (deleted)"


def _columns(rows: Sequence[tuple[str, ...]]) -> Iterable[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  " + "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    if not rows:
        return "<p>none</p>"
    cells = "".join(f"<th>{_text(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'


def _facts(facts: dict[str, str]) -> str:
    items = "".join(f"<dt>{_text(name)}</dt><dd>{_linked(value)}</dd>" for name, value in facts.items())
    return f"<dl>{items}</dl>"


def _linked(value: str) -> str:
    return f'<a href="{_text(value)}">{_text(value)}</a>' if value.startswith(("http://", "https://")) else _cell(value)


def _cell(value: str) -> str:
    if len(value) == HASH_DIGITS and " " not in value:
        return f"<code>{_text(value)}</code>"
    return f'<span class="long">{_text(value)}</span>' if "/" in value else _text(value)


def _text(value: str) -> str:
    return html.escape(value)


def _page(title: str, body: str) -> str:
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>'
            f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>\n'
            f"<body><h1>{_text(title)}</h1>\n{body}\n</body></html>\n")


STYLE = """
:root{color-scheme:light dark;--page:#f5f6f8;--card:#fff;--ink:#1b2330;--muted:#5d6878;--rule:#e3e7ed;--accent:#2563eb}
@media (prefers-color-scheme:dark){:root{--page:#0f131a;--card:#171d27;--ink:#e6eaf0;--muted:#95a1b3;--rule:#2a3240;
--accent:#6ea8fe}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1180px;padding:28px 20px 48px;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
h1{font-size:26px;margin:0 0 18px}h2{font-size:19px;margin:0 0 12px}
h3{font-size:13px;color:var(--muted);margin:20px 0 6px}
small{color:var(--muted);font-weight:400}a{color:var(--accent)}
.card{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:18px 20px;margin:0 0 14px}
dl{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:4px 20px;margin:0}
dt{color:var(--muted)}dd{margin:0;overflow-wrap:anywhere}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:6px 14px 6px 0;border-bottom:1px solid var(--rule);text-align:left;vertical-align:top}
th{color:var(--muted);font-size:12px;font-weight:600}td{white-space:nowrap}
.long{white-space:normal;overflow-wrap:anywhere;display:inline-block;min-width:200px}
code{font:12px/1.5 ui-monospace,"SF Mono",Menlo,"DejaVu Sans Mono",monospace}
tr:last-child td{border-bottom:0}details{margin:4px 0}summary{cursor:pointer}
"""
