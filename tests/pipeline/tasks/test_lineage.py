"""Lineage on a real registry: forth from a version to its files, back from a file to every model that saw it."""

import hashlib
import itertools
import json
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from mlflow import MlflowClient

from engine import store
from engine.errors import SpecError
from tasks import deployment as place
from tasks import jobs, lineage, pipeline, registry, runs, tracking
from tasks.registry import CandidateFiles, Decision
from tests.engine.s3_server import s3_server
from tests.pipeline.examples import preset
from tests.pipeline.fake_engine import write_prompts

NAMES = (f"traced-{i}" for i in itertools.count())


class Team:
    """Trains versions of one model, as `train_ppo` leaves them."""

    def __init__(self, tmp_path):
        self.model = next(NAMES)
        self.files = tmp_path / "data"
        self.files.mkdir()

    def file(self, name, content):
        """A data file that no other test has."""
        path = self.files / name
        path.write_text(f"{self.model} {content}")
        return str(path)

    def train(self, run_id, train, evaluation, base=None):
        """A registered version, trained on some files from the base model or another version."""
        source = {"kind": "reasoning_gym", "task": "chain_sum", "size": 8, "seed": 3}
        train_files, eval_files = ([{"kind": "file", "uri": file} for file in files] for files in (train, evaluation))
        prepare = {"max_prompt_tokens": 32, "train": {"sources": [source, *train_files]},
                   "eval": {"sources": eval_files or [source]}}
        plan = pipeline.parse_pipeline(preset(prepare=prepare, stages={"count": 1}, registry={"model": self.model}))
        parent = tracking.parent_run("lineage", f"{self.model}/{run_id}", name=run_id, lineage=tracking.Lineage(
            base_model=base.label if base else "/models/base"))
        file = runs.RunFile(
            pipeline=plan, preset="p", base_model=base.export_uri if base else "/models/base",
            base_version=base.label if base else "", tracking=parent, dag_id=self.model, run_id=run_id)
        root = runs.run_root(self.model, run_id)
        runs.write_run(root, file)
        write_prompts(Path(root, "prompts"), prepare)
        store.write_bytes(f"{root}/stage_1/export/model.safetensors", run_id)
        self.job(run_id, "prepare", {"stage": "prepare", "output": f"{root}/prompts"}, {"outputs": {}})
        checkpoint = f"{root}/stage_1/checkpoints/step-000004"
        store.write_bytes(f"{checkpoint}/manifest.json", json.dumps({"step": 4, "files": {}}))
        self.job(run_id, "stage_1.train", {
            "stage": "train", "checkpoint_dir": f"{root}/stage_1/checkpoints", "tracking": {"run_id": "nested"}},
            {"metrics": {"reward/mean": 0.5, "odd": float("nan")}, "gpu_seconds": 3600.0, "policy_version": 4})
        version = registry.register_candidate(self.model, CandidateFiles(
            export_uri=f"{root}/stage_1/export", weights_hash=store.hash_model_dir(f"{root}/stage_1/export"),
            run_id=parent.run_id, run_uri=root))
        lineage.record(file, version)
        return version

    def job(self, run_id, task, spec, result):
        """A finished job."""
        directory = jobs.job_directory(place.home(), self.model, run_id, task)
        directory.mkdir(parents=True)
        (directory / "spec.json").write_text(json.dumps(spec))
        (directory / "result.json").write_text(json.dumps({"stage": spec["stage"], **result}))


@pytest.fixture
def team(deployment, mlflow_uri, tmp_path):
    return Team(tmp_path)


def sha256(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def test_from_a_champion_to_data_code_spec_checkpoints_and_metrics(team):
    rows, held_out = team.file("rows.jsonl", 1), team.file("held.jsonl", 2)
    version = team.train("r", [rows], [held_out])
    registry.promote(version, base=None, files_hash=version.weights_hash, decision=Decision(by="ada", reason="good"))
    made, base = lineage.ancestry(team.model, "champion")
    found = made.lineage
    assert made.label == f"{team.model}/1" and made.state == "champion" and base.label == "/models/base"
    assert found.weights_hash == version.weights_hash and found.export_uri == version.export_uri
    train, held = found.prompts.sets["train"], found.prompts.sets["eval"]
    assert [(f.uri, f.sha256) for f in train.files] == [(rows, sha256(rows))]
    assert [(f.uri, f.sha256) for f in held.files] == [(held_out, sha256(held_out))]
    assert train.generated[0]["task"] == "chain_sum" and train.generated[0]["seed"] == 3 and not held.generated
    root = version.tags["ratchet.run"]
    assert found.prompts.manifest_sha256 == sha256(f"{root}/prompts/manifest.json")
    assert found.code.source_sha256 == tracking.source_hash() and len(found.code.source_sha256) == 64
    job = found.jobs["stage_1.train"]
    assert job.spec_sha256 == sha256(Path(job.directory, "spec.json")) and job.mlflow_run_id == "nested"
    assert job.metrics == {"reward/mean": 0.5} and job.gpu_seconds == 3600.0
    [checkpoint] = job.checkpoints
    assert checkpoint.step == 4 and checkpoint.manifest_sha256 == sha256(f"{checkpoint.uri}/manifest.json")
    assert made.there == {version.export_uri: True, found.prompts.uri: True, checkpoint.uri: True}
    tags = MlflowClient().get_run(version.run_id).data.tags
    assert tags[f"ratchet.file.{sha256(rows)}"] == f"train {rows}"
    assert tags["ratchet.data_hash"] == found.prompts.manifest_sha256
    assert sha256(rows) in tracking.read_text(version.run_id, "lineage/lineage.html"), "the page is in MLflow too"


def test_the_lineage_outlives_the_files_of_the_run(team):
    version = team.train("r", [team.file("rows.jsonl", 1)], [])
    root = version.tags["ratchet.run"]
    before = lineage.ancestry(team.model, "1")[0]
    shutil.rmtree(f"{root}/stage_1")
    after = lineage.ancestry(team.model, "1")[0]
    assert after.lineage == before.lineage and after.there[version.export_uri] is False
    shutil.rmtree(root)
    assert lineage.ancestry(team.model, "1")[0].lineage == before.lineage, "from MLflow"
    assert "(deleted)" in lineage.lineage_page.Chain(lineage.ancestry(team.model, "1")).text()


def test_a_version_without_lineage_says_so_and_an_unknown_one_is_refused(team):
    run = tracking.parent_run("lineage", f"{team.model}/old", name="old", lineage=tracking.Lineage())
    registry.register_candidate(team.model, CandidateFiles("/e", "w", run.run_id, run_uri="/gone"))
    [step] = lineage.ancestry(team.model, "candidate")
    assert step.lineage is None and "wrote no lineage" in step.note
    with pytest.raises(SpecError, match=f"no {team.model}/7"):
        lineage.ancestry(team.model, "7")


def test_which_models_saw_a_file_follows_what_they_were_trained_from(team):
    first, second, held = (team.file(name, i) for i, name in enumerate(("a.jsonl", "b.jsonl", "c.jsonl")))
    one = team.train("1", [first, second], [held])
    two = team.train("2", [second], [held], base=one)
    three = team.train("3", [], [first], base=two)
    team.train("4", [held], [])
    found = {name: {s.label: s.how for s in lineage.seen_by(sha256(path))}
             for name, path in (("first", first), ("second", second), ("held", held))}
    labels = [f"{team.model}/{number}" for number in (1, 2, 3, 4)]
    assert found["first"] == {labels[0]: "train", labels[2]: "eval", labels[1]: f"through {labels[0]}"}
    assert found["second"] == {labels[0]: "train", labels[1]: "train", labels[2]: f"through {labels[1]}"}
    assert found["held"] == {
        labels[0]: "eval", labels[1]: "eval", labels[3]: "train", labels[2]: f"through {labels[1]}"}
    assert lineage.seen_by("0" * 64) == []
    chain = [step.label for step in lineage.ancestry(team.model, three.version)]
    assert chain == [labels[2], labels[1], labels[0], "/models/base"]


def test_a_model_that_was_given_by_its_path_counts_too(team):
    rows = team.file("rows.jsonl", 1)
    one = team.train("1", [rows], [])
    tracking.parent_run("lineage", "x", name="x", lineage=tracking.Lineage())
    run = tracking.parent_run("lineage", f"{team.model}/by-path", name="by path",
                              lineage=tracking.Lineage(base_model=one.export_uri))
    two = registry.register_candidate(team.model, CandidateFiles("/e", "w", run.run_id, run_uri="/r"))
    assert {s.label: s.how for s in lineage.seen_by(sha256(rows))} == {
        one.label: "train", two.label: f"through {one.label}"}


def test_more_files_than_mlflow_takes_at_once_are_all_found(team):
    files = [team.file(f"{i}.jsonl", i) for i in range(tracking.TAGS_AT_ONCE + 5)]
    version = team.train("1", files, [])
    assert all([s.label for s in lineage.seen_by(sha256(file))] == [version.label] for file in (files[0], files[-1]))


def test_the_command_line_goes_both_ways(team, capsys, tmp_path):
    rows = team.file("rows.jsonl", 1)
    version = team.train("r", [rows], [])
    assert lineage.main([f"{team.model}/candidate"]) == 0
    text = capsys.readouterr().out
    assert f"{version.label} (candidate)" in text and sha256(rows) in text and "1.00 GPU-hours" in text
    assert lineage.main(["--file", rows]) == 0
    assert f"1 registered models saw {rows}" in (said := capsys.readouterr().out) and version.label in said
    assert lineage.main(["--file", sha256(rows).upper(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["label"] == version.label
    Path(rows).write_text("other content")
    assert lineage.main(["--file", rows]) == 0
    assert "No registered model saw" in capsys.readouterr().out
    assert lineage.main([f"{team.model}/9"]) == 2 and lineage.main(["--file", str(tmp_path / "none")]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and all(line.startswith("error: ") for line in said)


class _Page(HTMLParser):
    """What a page shows, and what it would fetch."""

    def __init__(self, text):
        super().__init__()
        self.cells, self.fetched = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.fetched += [value for name, value in attributes if name == "src" or (name == "href" and tag == "link")]

    def handle_data(self, data):
        self.cells.append(data)


def test_the_page_shows_everything_escaped_and_fetches_nothing(team, tmp_path):
    rows = team.file("<b>rows.jsonl", 1)
    version = team.train("r", [rows], [])
    target = tmp_path / "page.html"
    assert lineage.main([f"{team.model}/1", "--html", str(target)]) == 0
    page = _Page(target.read_text())
    for shown in (rows, sha256(rows), version.weights_hash, "reward/mean", "chain_sum", "0.5", tracking.source_hash()):
        assert any(shown in cell for cell in page.cells), shown
    assert page.fetched == [] and "<b>" not in target.read_text() and "prefers-color-scheme:dark" in target.read_text()
    assert lineage.main(["--file", rows, "--html", str(target)]) == 0
    assert version.label in _Page(target.read_text()).cells


def test_a_file_on_s3_is_known_by_its_content(monkeypatch):
    with s3_server(monkeypatch):
        store.write_bytes("s3://bucket/rows.jsonl", b"rows")
        assert lineage.content_hash("s3://bucket/rows.jsonl") == hashlib.sha256(b"rows").hexdigest()
