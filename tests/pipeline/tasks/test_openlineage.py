"""What operators tell Airflow's OpenLineage provider. It is no dependency: without it, its documented protocol (an
`OperatorLineage` of datasets with facets) is stood in for; where it is installed, these tests run against it."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import pytest

from engine import store
from engine.spec import EvaluateSpec, PrepareSpec, RunResult, TrainSpec
from tasks import jobs, openlineage, runs
from tasks.launchers import local
from tasks.operators import EngineOperator, RegisterOperator
from tasks.pipeline import RUN_FIELDS, build
from tests.pipeline.examples import preset
from tests.pipeline.tasks.test_jobs import prepare_to


@dataclass
class _Lineage:
    inputs: list = field(default_factory=list)
    outputs: list = field(default_factory=list)
    run_facets: dict = field(default_factory=dict)
    job_facets: dict = field(default_factory=dict)


@dataclass
class _Dataset:
    namespace: str
    name: str
    facets: dict


@dataclass
class _Version:
    datasetVersion: str


@pytest.fixture
def provider(monkeypatch):
    """The provider's modules, or what stands in for them."""
    if importlib.util.find_spec("openlineage") is not None:
        return
    modules = {
        "airflow.providers.openlineage": {}, "openlineage": {}, "openlineage.client": {},
        "airflow.providers.openlineage.extractors": {"OperatorLineage": _Lineage},
        "openlineage.client.event_v2": {"Dataset": _Dataset},
        "openlineage.client.facet_v2": {
            "dataset_version_dataset": SimpleNamespace(DatasetVersionDatasetFacet=_Version)}}
    for name, content in modules.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)


def named(datasets):
    return [(d.namespace, d.name, d.facets["version"].datasetVersion if d.facets else "") for d in datasets]


def test_places_are_named_as_openlineage_says():
    for uri, namespace, name in (("/a/b", "file", "/a/b"), ("s3://bucket/a/b", "s3://bucket", "a/b"),
                                 ("http://server:5000/models/m/3", "http://server:5000", "models/m/3")):
        place = openlineage.Place(uri)
        assert (place.namespace, place.name) == (namespace, name)


def test_a_training_reads_model_prompts_and_checkpoint_and_writes_what_its_result_names():
    spec = build(TrainSpec, RUN_FIELDS["train"] | preset()["train"] | {
        "model": "/m", "prompts": "s3://b/p", "resume_from": "/before/step-000004"})
    result = RunResult(stage="train", outputs={"checkpoint": "/c", "export": "/e"},
                       hashes={"weights": "w", "prompts": "q"})
    assert openlineage.job_inputs(spec, result) == [
        openlineage.Place("/m"), openlineage.Place("s3://b/p", "q"), openlineage.Place("/before/step-000004")]
    assert openlineage.job_outputs(result) == [openlineage.Place("/c"), openlineage.Place("/e", "w")]


def test_an_evaluation_reads_its_models_and_prompts():
    spec = build(EvaluateSpec, RUN_FIELDS["evaluate"] | preset()["evaluate"] | {
        "models": [{"name": "a", "uri": "/a"}, {"name": "b", "uri": "s3://b/b"}], "prompts": "/p"})
    read = openlineage.job_inputs(spec, RunResult(stage="evaluate", hashes={"prompts": "q"}))
    assert [place.uri for place in read] == ["/a", "s3://b/b", "/p"] and read[-1].version == "q"


def test_prepare_reads_the_data_files_that_its_manifest_names(tmp_path, provider):
    store.write_bytes(tmp_path / "p" / "manifest.json", json.dumps(
        {"sets": {"train": {"sources": [{"uri": "s3://b/rows.jsonl", "content": "etag:1", "sha256": "f"}]},
                  "eval": {"sources": [{"uri": "s3://b/rows.jsonl", "content": "etag:1", "sha256": "f"}]}}}))
    spec = build(PrepareSpec, RUN_FIELDS["prepare"] | preset()["prepare"] | {"tokenizer": "/t"})
    read = openlineage.job_inputs(spec, RunResult(stage="prepare", outputs={"prompts": str(tmp_path / "p")}))
    assert named(openlineage.lineage(read, []).inputs) == [("s3://b", "rows.jsonl", "f"), ("file", "/t", "")]
    gone = RunResult(stage="prepare", outputs={"prompts": "/none"})
    assert [place.uri for place in openlineage.job_inputs(spec, gone)] == ["/t"], "no event is worth a failed task"


def test_an_engine_task_says_what_its_job_read_and_wrote(deployment, provider):
    spec = prepare_to(deployment.home / "prompts")
    operator = EngineOperator(task_id="t", spec=lambda context: spec)
    operator._directory, operator._spec = deployment.home / "jobs" / "d" / "r" / "t", spec
    assert operator.get_openlineage_facets_on_complete(None) is None, "no result, no event's datasets"
    jobs.submit(operator._directory, spec, local)
    while jobs.state_of(operator._directory, local).phase == "running":
        pass
    found = operator.get_openlineage_facets_on_complete(None)
    assert (("file", str(deployment.home / "prompts"), "")) in named(found.outputs)
    assert ("file", spec.tokenizer, "") in named(found.inputs)


def test_registering_reads_the_export_and_writes_the_version(tmp_path, monkeypatch, provider):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@server:5000")
    runs.write_candidate(str(tmp_path), runs.CandidateFile(
        model="m", version="3", stage=1, export_uri="/e", weights_hash="w", prompts="/p"))
    operator = RegisterOperator(task_id="register", python_callable=lambda: {"run_uri": str(tmp_path)})
    operator.execute({})
    found = operator.get_openlineage_facets_on_complete(None)
    assert named(found.inputs) == [("file", "/e", "w")]
    assert named(found.outputs) == [("http://server:5000", "models/m/3", "w")]


def test_nothing_of_openlineage_is_imported_without_being_asked():
    code = "import sys, tasks.operators; print([name for name in sys.modules if name.startswith('openlineage')])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip().splitlines()[-1] == "[]"
