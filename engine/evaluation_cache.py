"""Evaluations that were made before, by what decides their result: weights, end tokens, prompts, settings."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from engine import store
from engine.backends.vllm.requests import read_stop_token_ids
from engine.spec.evaluation import EVALUATION_FILE, SAMPLES_FILE, ModelEvaluation, SampleRecord


@dataclass(frozen=True)
class CachedEvaluation:
    """One model's scores and its responses."""

    evaluation: ModelEvaluation
    samples: Sequence[SampleRecord]

    def renamed(self, name: str, uri: str) -> "CachedEvaluation":
        """The same evaluation under what this job calls the model."""
        return CachedEvaluation(
            self.evaluation.model_copy(update={"model": name, "uri": uri}),
            [sample.model_copy(update={"model": name}) for sample in self.samples])


class EvaluationCache:
    """A directory or an `s3://` prefix with one entry per key; None keeps and finds nothing."""

    def __init__(self, uri: str | None, settings_hash: str, prompts_hash: str):
        self._uri, self._settings_hash, self._prompts_hash = uri, settings_hash, prompts_hash

    def find(self, weights_hash: str, model_dir: Path) -> CachedEvaluation | None:
        """The entry of a model, if there is a whole one."""
        entry = self._entry(weights_hash, model_dir)
        if entry is None or not store.exists(store.join(entry, EVALUATION_FILE)):
            return None
        try:
            evaluation = ModelEvaluation.model_validate_json(store.read_bytes(store.join(entry, EVALUATION_FILE)))
            lines = store.read_text(store.join(entry, SAMPLES_FILE)).splitlines()
            return CachedEvaluation(evaluation, [SampleRecord.model_validate_json(line) for line in lines])
        except ValidationError:
            # Written by another version of the schema: generate again and replace it.
            return None

    def keep(self, found: CachedEvaluation, model_dir: Path) -> None:
        """Write an entry; its evaluation.json comes last, so that an entry with one is whole."""
        entry = self._entry(found.evaluation.weights_hash, model_dir)
        if entry is None:
            return
        samples = "".join(sample.model_dump_json() + "\n" for sample in found.samples)
        store.write_bytes(store.join(entry, SAMPLES_FILE), samples)
        store.write_bytes(store.join(entry, EVALUATION_FILE), found.evaluation.model_dump_json(indent=1))

    def _entry(self, weights_hash: str, model_dir: Path) -> str | None:
        if self._uri is None:
            return None
        key = f"{weights_hash}/{self._prompts_hash}/{self._settings_hash}/{read_stop_token_ids(model_dir)}"
        return store.join(self._uri, store.sha256_bytes(key.encode()))
