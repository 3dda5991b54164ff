"""The report: right numbers, a page that stands alone, and files that are what they say."""

import json
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from engine.charts import COLOURS, downsample, number, smooth
from engine.errors import DataError
from engine.report import choose_pairs, compare, read_all_metrics, write_report
from engine.report_page import duration
from engine.spec import (
    Evaluation,
    ModelEvaluation,
    PromptScores,
    ReportSpec,
    RunResult,
    SampleRecord,
    TrackingSpec,
    dump_spec,
)
from engine.spec.report import GATE_SLOT, VERDICT_SLOT
from engine.statistics import summarise

ROOT = Path(__file__).parents[3]


def _write_metrics(path, steps, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"step": step, "time": 1000.0 + step, "metrics": {name: column[i] for name, column in columns.items()}}
            for i, step in enumerate(steps)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _training(path, steps):
    steps = list(steps)
    wave = [0.3 + 0.01 * (step % 7) for step in steps]
    return _write_metrics(path, steps, **{
        "reward/mean": wave, "reward/std": wave, "actor/kl_to_reference": wave, "rollout/response_tokens_mean": wave,
        "rollout/response_tokens_max": wave, "time/generate_s": wave, "time/update_s": wave, "time/iteration_s": wave,
        "time/samples_per_s": [64 / w for w in wave], "rollout/tokens_per_s": wave})


def _model(name, scores):
    prompts = [PromptScores(id=f"p{i:03d}", task="sum" if i % 2 else "product", greedy=float(row[0]),
                            sampled=row[1:].tolist(), lengths=[3] * len(row)) for i, row in enumerate(scores)]
    return ModelEvaluation(model=name, weights_hash=name, prompts_hash="h", prompts=prompts,
                           metrics=summarise(prompts, 1.0))


def _sample(model, name, score, response, prompt="2 + 2 = ?"):
    return SampleRecord(model=model, id=name, task="sum", prompt=prompt, answer="4", response=response, greedy=True,
                        score=score, tokens=2)


@pytest.fixture
def whole(tmp_path):
    """A spec with every part of a report, over two stages."""
    rng = np.random.default_rng(0)
    models = [_model("base", rng.random((60, 3)) * 0.5), _model("candidate", rng.random((60, 3)))]
    evaluation = Evaluation(models=models)
    (tmp_path / "evaluation.json").write_text(evaluation.model_dump_json())
    nasty = "<script>alert(1)</script> & \"quotes\""
    samples = [_sample("base", "p000", 0.0, nasty, nasty), _sample("candidate", "p000", 1.0, "4", nasty)]
    (tmp_path / "samples.jsonl").write_text("".join(s.model_dump_json() + "\n" for s in samples))
    results = []
    for stage in ("train_stage_1", "evaluate_stage_1"):
        (tmp_path / stage).mkdir()
        (tmp_path / stage / "result.json").write_text(
            RunResult(stage="train", gpu_seconds=7200, timings_s={"train": 3700.0}).model_dump_json())
        results.append(str(tmp_path / stage / "result.json"))
    return ReportSpec(
        title="Run <1>", output=str(tmp_path / "out"), results=results, gpu_hour_price=2.5,
        metrics=[_training(tmp_path / "1.jsonl", range(1, 31)), _training(tmp_path / "2.jsonl", range(31, 61))],
        evaluation=str(tmp_path / "evaluation.json"), samples=str(tmp_path / "samples.jsonl"),
        facts={"seed": "0", "MLflow": "http://127.0.0.1/run", "odd": "javascript:alert(1)"})


class _Page(HTMLParser):
    """Counts what matters about a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.ids, self.links = Counter(), Counter(), []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags[tag] += 1
        if "id" in attrs:
            self.ids[attrs["id"]] += 1
        self.links += [value for name, value in attrs.items() if name in ("href", "src", "xlink:href")]

    def handle_data(self, data):
        self.text += data


def test_the_page_stands_alone_and_holds_every_part(whole, tmp_path):
    files = write_report(whole, tmp_path / "report")
    text = files[0].read_text()
    found = _Page(text)
    charts = ["reward", "kl", "response_length", "phases", "throughput", "generation"]
    assert [f.stem for f in files] == ["report", *charts]
    assert all(f.read_bytes().startswith(b"\x89PNG") for f in files[1:])
    outside = [link for link in found.links if not link.startswith("#")]
    assert outside == ["http://127.0.0.1/run"]
    assert found.tags["svg"] == 6 and found.tags["script"] == found.tags["img"] == found.tags["link"] == 0
    assert max(found.ids.values()) == 1
    assert all(link[1:] in found.ids for link in found.links if link.startswith("#"))
    for part in ("Before and after", "Greedy answers", "Time and cost", "stage 2", "1 h 01 min", "10.00"):
        assert part in found.text


def test_the_page_has_one_place_each_for_the_verdict_and_the_gate_both_empty(whole, tmp_path):
    text = write_report(whole, tmp_path / "report")[0].read_text()
    for begin, end in (VERDICT_SLOT, GATE_SLOT):
        assert text.count(begin + end) == text.count(begin) == text.count(end) == 1


def test_without_a_price_there_are_no_costs(whole, tmp_path):
    free = whole.model_copy(update={"gpu_hour_price": None})
    text = _Page(write_report(free, tmp_path / "report")[0].read_text()).text
    assert "rank-seconds" in text and "7,200" in text and "cost" not in text.replace("Time and cost", "")


def test_the_charts_follow_the_pages_theme(whole, tmp_path):
    text = write_report(whole, tmp_path / "report")[0].read_text()
    assert "prefers-color-scheme:dark" in text
    for svg in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        assert "var(--muted)" in svg
        assert not set(COLOURS) & set(re.findall(r"#[0-9a-f]{6}\b", svg))


def test_what_a_model_wrote_is_shown_as_text(whole, tmp_path):
    text = write_report(whole, tmp_path / "report")[0].read_text()
    assert "<script" not in text and "&lt;script&gt;alert(1)" in text
    assert 'href="javascript' not in text
    assert "Run &lt;1&gt;" in text


def test_the_same_files_give_the_same_page(whole, tmp_path):
    first, second = (write_report(whole, tmp_path / name)[0].read_bytes() for name in ("a", "b"))
    assert first == second


@pytest.mark.parametrize("count", [1, 2, 1500])
def test_any_number_of_iterations_makes_a_report_of_bounded_size(tmp_path, count):
    spec = ReportSpec(title="t", metrics=[_training(tmp_path / "m.jsonl", range(count))], output=str(tmp_path))
    files = write_report(spec, tmp_path / "report")
    assert len(files) == 7 and files[0].stat().st_size < 600_000


def test_metrics_that_are_absent_or_never_finite_have_no_chart(tmp_path):
    metrics = _write_metrics(tmp_path / "m.jsonl", range(3), **{
        "reward/mean": [0.1, 0.2, 0.3], "actor/entropy": [float("nan")] * 3})
    files = write_report(ReportSpec(title="t", metrics=[metrics], output=str(tmp_path)), tmp_path / "report")
    assert [f.stem for f in files] == ["report", "reward"]


def test_stages_join_where_they_met_and_a_repeated_step_counts_once(tmp_path):
    first = _write_metrics(tmp_path / "1.jsonl", [1, 2, 3], a=[1.0, 2.0, 3.0])
    second = _write_metrics(tmp_path / "2.jsonl", [3, 4], a=[30.0, 4.0], b=[0.5, 0.6])
    with open(second, "a") as file:
        file.write('{"step": 5, "ti')  # torn by a kill
    metrics = read_all_metrics([first, second])
    assert metrics.steps.tolist() == [1, 2, 3, 4] and metrics.stage_starts == [3]
    assert metrics.series["a"].tolist() == [1, 2, 30, 4]
    assert np.isnan(metrics.series["b"][:2]).all() and metrics.series["b"][2:].tolist() == [0.5, 0.6]


def test_a_report_without_iterations_or_without_a_model_is_refused(tmp_path, whole):
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match="not one iteration"):
        read_all_metrics([str(tmp_path / "empty.jsonl")])
    with pytest.raises(DataError, match="no model 'champion'; it has"):
        write_report(whole.model_copy(update={"before": "champion"}), tmp_path / "report")


def test_a_change_has_the_paired_t_interval_and_rows_are_paired_by_id():
    rng = np.random.default_rng(1)
    old, new = rng.random((40, 3)), rng.random((40, 3)) + 0.1
    before, after = _model("base", old), _model("candidate", new)
    shuffled = before.model_copy(update={"prompts": before.prompts[::-1]})
    rows = {row.name: row for row in compare(shuffled, after, 1.0)}
    expected = stats.ttest_rel(new[:, 1:].mean(axis=1), old[:, 1:].mean(axis=1)).confidence_interval(0.95)
    assert (rows["mean_reward"].change_low, rows["mean_reward"].change_high) == pytest.approx(tuple(expected))
    assert rows["task/sum/greedy_reward"].change_low is None
    assert [name.startswith("task/") for name in rows] == sorted(name.startswith("task/") for name in rows)


def test_samples_shown_are_those_that_gained_lost_and_changed_most():
    scores = {"a": (0.0, 1.0), "b": (1.0, 0.0), "c": (0.5, 0.5), "d": (0.5, 0.5), "e": (0.2, 0.4)}
    words = {"d": "other"}
    samples = [_sample("base", n, s[0], "4") for n, s in scores.items()]
    samples += [_sample("candidate", n, s[1], words.get(n, "4")) for n, s in scores.items()]
    samples.append(_sample("candidate", "only one side", 1.0, "4"))
    pairs = choose_pairs(samples, "base", "candidate")
    assert [(p.kind, p.after.id) for p in pairs] == [("gained", "a"), ("gained", "e"), ("lost", "b"), ("changed", "d")]


@given(st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")), max_size=300), st.integers(1, 50))
def test_downsampling_keeps_the_sum_and_bounds_the_points(values, points):
    values = np.array(values, dtype=float)
    steps = np.arange(len(values))
    x, y = downsample(steps, values, points)
    kept = np.isfinite(values)
    assert len(x) == len(y) == min(points, kept.sum())
    if kept.any():
        bins = np.array_split(values[kept], len(y)) if kept.sum() <= points else None
        assert y.min() >= values[kept].min() - 1e-6 and y.max() <= values[kept].max() + 1e-6
        assert bins is None or np.array_equal(y, values[kept])
        assert (np.diff(x) > 0).all()


def test_a_bin_is_the_mean_of_what_it_holds():
    x, y = downsample(np.arange(10), np.arange(10) ** 2.0, 5)
    assert x.tolist() == [0.5, 2.5, 4.5, 6.5, 8.5]
    assert y.tolist() == [(a * a + (a + 1) ** 2) / 2 for a in range(0, 10, 2)]


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=40), st.integers(1, 9))
def test_smoothing_is_the_mean_of_the_neighbours(values, width):
    half = width // 2
    slow = [np.mean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]
    expected = values if width < 2 or len(values) < 3 else slow
    assert smooth(np.array(values), width).tolist() == pytest.approx(list(expected), abs=1e-9)


@pytest.mark.parametrize(("value", "shown"), [
    (0.0, "0.000"), (0.12345, "0.123"), (-1.234, "-1.23"), (12.34, "12.3"), (12345.6, "12,346"), (0.00123, "0.0012"),
    (float("nan"), "n/a")])
def test_numbers_are_written_for_people(value, shown):
    assert number(value) == shown


@pytest.mark.parametrize(("seconds", "shown"), [(3.21, "3.2 s"), (724, "12 min 04 s"), (7500, "2 h 05 min")])
def test_durations_are_written_for_people(seconds, shown):
    assert duration(seconds) == shown


def test_the_stage_writes_its_output_and_logs_it_to_the_run(whole, tmp_path, client):
    run_id = client.create_run("0").info.run_id
    job = tmp_path / "job"
    job.mkdir()
    spec = whole.model_copy(update={"tracking": TrackingSpec(run_id=run_id)})
    (job / "spec.json").write_text(dump_spec(spec))
    done = subprocess.run([sys.executable, "-m", "engine", "report", str(job)], cwd=ROOT, capture_output=True,
                          text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = RunResult.model_validate_json((job / "result.json").read_text())
    assert Path(result.outputs["report"]).read_text().startswith("<!doctype html>")
    logged = {artifact.path for artifact in client.list_artifacts(run_id, "report")}
    assert {"report/report.html", "report/reward.png", "report/phases.png"} <= logged
