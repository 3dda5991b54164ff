"""The report stage: curves, before and after, samples. One HTML file that needs nothing else, and PNGs."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from engine import store
from engine.charts import draw_all
from engine.errors import DataError
from engine.job import Job
from engine.mlflow_sender import parse_line
from engine.report_page import Content, Metrics, Row, StageCost, page
from engine.spec.evaluation import Evaluation, ModelEvaluation, SampleRecord, choose_pairs
from engine.spec.job import RunResult
from engine.spec.report import ReportSpec
from engine.statistics import SCORES, cluster_labels, mean_interval, prompt_scores
from engine.tracking import Tracker

REPORT_FILE = "report.html"


def run(job: Job, spec: ReportSpec) -> RunResult:
    """Write the report and log it to MLflow.

    Raises:
        RefusedError: no metrics, or files that are not what the spec says.
    """
    job.progress("report")
    directory = job.dir / "report"
    files = write_report(spec, directory)
    with Tracker(job.dir, spec.tracking) as tracker:
        for file in files:
            tracker.log_artifact(file, "report")
    for file in files:
        store.upload_file(file, store.join(spec.output, file.name))
    return RunResult(stage="report", outputs={"report": store.join(spec.output, REPORT_FILE)})


def write_report(spec: ReportSpec, directory: Path) -> list[Path]:
    """Write `report.html` and a PNG of every chart into `directory`; the page first in the list.

    Raises:
        DataError: no metrics at all, or the evaluation has not both models.
    """
    directory.mkdir(parents=True, exist_ok=True)
    metrics = read_all_metrics(spec.metrics)
    charts = draw_all(metrics.steps, metrics.series, metrics.stage_starts, directory)
    rows: list[Row] = []
    if spec.evaluation:
        evaluation = Evaluation.model_validate_json(store.read_text(spec.evaluation))
        try:
            before, after = evaluation.of(spec.before), evaluation.of(spec.after)
        except KeyError as error:
            raise DataError(f"{spec.evaluation}: {error.args[0]}") from None
        rows = compare(before, after, evaluation.pass_threshold)
    pairs = choose_pairs(_samples(spec), spec.before, spec.after) if spec.samples else []
    content = Content(spec, metrics, charts, rows, pairs, [_cost(uri, spec.gpu_hour_price) for uri in spec.results])
    report = directory / REPORT_FILE
    store.write_atomic(report, page(content))
    return [report, *(chart.png for chart in charts)]


def read_all_metrics(uris: Iterable[str]) -> Metrics:
    """The iterations of all stages as arrays; of a step that stands in several files the last counts.

    Raises:
        DataError: not one iteration.
    """
    records: dict[int, tuple[float, dict[str, float]]] = {}
    first_of_stage = []
    for uri in uris:
        lines = [record for record in map(parse_line, store.read_text(uri).splitlines()) if record]
        first_of_stage += [lines[0]["step"]] if lines else []
        records |= {record["step"]: (record["time"], record["metrics"]) for record in lines}
    if not records:
        raise DataError("metrics: not one iteration was logged; a report needs a run that trained")
    steps = np.array(sorted(records))
    rows = [records[step][1] for step in steps]
    names = sorted({name for row in rows for name in row})
    series = {name: np.array([row.get(name, np.nan) for row in rows], dtype=float) for name in names}
    times = np.array([records[step][0] for step in steps])
    return Metrics(steps, times, series, first_of_stage[1:])


def compare(before: ModelEvaluation, after: ModelEvaluation, pass_threshold: float) -> list[Row]:
    """Every metric that both evaluations have, tasks last; scores with the paired interval of their change."""
    order = {p.id: i for i, p in enumerate(after.prompts)}
    old = sorted((p for p in before.prompts if p.id in order), key=lambda p: order[p.id])
    known = {p.id for p in old}
    new = [p for p in after.prompts if p.id in known]
    rows = []
    for name, value in after.metrics.items():
        if name not in before.metrics or name.endswith(("_low", "_high")) or name == "num_prompts":
            continue
        if name in SCORES and new:
            change = prompt_scores(new, name, pass_threshold) - prompt_scores(old, name, pass_threshold)
            interval = mean_interval(change, clusters=cluster_labels(new))
            rows.append(Row(name, before.metrics[name], value, interval.low, interval.high))
        else:
            rows.append(Row(name, before.metrics[name], value))
    return sorted(rows, key=lambda row: row.name.startswith("task/"))


def _samples(spec: ReportSpec) -> Iterable[SampleRecord]:
    lines = store.read_text(spec.samples or "").splitlines()
    return (SampleRecord.model_validate_json(line) for line in lines if line.strip())


def _cost(uri: str, price: float | None) -> StageCost:
    result = RunResult.model_validate(json.loads(store.read_text(uri)))
    # The directory of a job is named after its task.
    name = Path(uri).parent.name or result.stage
    seconds = result.timings_s.get("total", result.timings_s.get(result.stage, result.gpu_seconds))
    cost = None if price is None else result.gpu_seconds / 3600 * price
    return StageCost(name, seconds, result.gpu_seconds, cost)
