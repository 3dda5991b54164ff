"""OpenLineage: what a task read and wrote, for Airflow's OpenLineage provider where it is installed.

The provider calls `get_openlineage_facets_on_complete` of an operator that has it and sends the event; nothing here is
called, and nothing of OpenLineage imported, without it. Places are named as its naming conventions say: `file` or the
bucket as the namespace, the path as the name.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from engine import store
from engine.errors import FaultError
from engine.spec import EvaluateSpec, PrepareSpec, ReportSpec, RunResult, RunSpec
from engine.spec.train import TrainingSpec


@dataclass(frozen=True)
class Place:
    """A dataset in OpenLineage's words."""

    uri: str
    version: str = ""
    """sha256 of its content, when it is known."""

    @property
    def namespace(self) -> str:
        """`s3://bucket`; `file` for a path; an MLflow server's models have its address."""
        scheme, separator, rest = self.uri.partition("://")
        return f"{scheme}{separator}{rest.split('/')[0]}" if separator else "file"

    @property
    def name(self) -> str:
        """What remains of the URI."""
        rest = self.uri.partition("://")[2]
        return rest.partition("/")[2] if rest else self.uri


def job_inputs(spec: RunSpec, result: RunResult) -> list[Place]:
    """What an engine job read."""
    if isinstance(spec, PrepareSpec):
        return [*_sources(result.outputs.get("prompts", spec.output)), Place(spec.tokenizer)]
    if isinstance(spec, TrainingSpec):
        read = [Place(spec.model), Place(spec.prompts, result.hashes.get("prompts", ""))]
        return read + ([Place(spec.resume_from)] if spec.resume_from else [])
    if isinstance(spec, EvaluateSpec):
        models = [Place(model.uri) for model in spec.models]
        return [*models, Place(spec.prompts, result.hashes.get("prompts", ""))]
    assert isinstance(spec, ReportSpec), type(spec).__name__
    return [Place(uri) for uri in (*spec.metrics, *spec.results, spec.evaluation) if uri]


def job_outputs(result: RunResult) -> list[Place]:
    """What it wrote: the outputs of its result."""
    return [Place(uri, result.hashes.get("weights", "") if name == "export" else "")
            for name, uri in result.outputs.items()]


def lineage(inputs: Iterable[Place], outputs: Iterable[Place]) -> Any:
    """The provider's `OperatorLineage`."""
    from airflow.providers.openlineage.extractors import OperatorLineage

    return OperatorLineage(inputs=_datasets(inputs), outputs=_datasets(outputs))


def _datasets(places: Iterable[Place]) -> list[Any]:
    from openlineage.client.event_v2 import Dataset
    from openlineage.client.facet_v2 import dataset_version_dataset as versions

    return [Dataset(
        namespace=place.namespace, name=place.name,
        facets={"version": versions.DatasetVersionDatasetFacet(datasetVersion=place.version)} if place.version else {})
        for place in dict.fromkeys(places)]


def _sources(prompts: str) -> list[Place]:
    """The data files of prepared prompts, as their manifest says."""
    try:
        sets = json.loads(store.read_bytes(store.join(prompts, store.MANIFEST)))["sets"]
    except FaultError:
        return []  # the event is not worth a failed task
    return [Place(source["uri"], source.get("sha256", "")) for made in sets.values() for source in made["sources"]]
