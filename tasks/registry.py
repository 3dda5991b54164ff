"""The MLflow model registry: candidates, the champion, and moving from one to the other.

A version is one exported Hugging Face directory. MLflow refuses sources outside a run's artifacts, so the version's source
is its run and the directory's URI is the tag `ratchet.export`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

CANDIDATE, CHAMPION, PREVIOUS = "candidate", "champion", "previous_champion"


@dataclass(frozen=True)
class Version:
    """One model version of the registry."""

    model: str
    version: str
    export_uri: str
    """Hugging Face directory."""
    weights_hash: str
    run_id: str
    tags: Mapping[str, str]

    @property
    def label(self) -> str:
        """`name/3`."""
        return f"{self.model}/{self.version}"


@dataclass(frozen=True)
class CandidateFiles:
    """What a candidate is made of."""

    export_uri: str
    weights_hash: str
    run_id: str
    """MLflow run that made it: a retry with the same run and hash finds the version instead of making another."""
    spec_hash: str = ""
    prompts_hash: str = ""
    run_uri: str = ""
    """Directory of the pipeline run that made it (tag `ratchet.run`): its review reads the settings there."""
    base: str = ""
    """Champion version number it was trained from or compared with; empty: none."""
    metrics: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Decision:
    """Who decided about a version, and why."""

    by: str
    """A person's name, or `policy`."""
    reason: str
    gate: str = ""
    """Gate result as Markdown; goes to the version's description."""
    url: str = ""
    """Airflow run of the decision."""


class RegistryConflict(RuntimeError):
    """The registry is not as it was when the evidence was made; nothing was changed."""


def register_candidate(model: str, files: CandidateFiles) -> Version:
    """Make the version (or find it, on a retry) and point the alias `candidate` at it."""
    raise NotImplementedError


def read(model: str, alias_or_version: str) -> Version | None:
    """The version behind an alias or a number; None when there is none."""
    raise NotImplementedError


def promote(candidate: Version, *, base: Version | None, files_hash: str, decision: Decision) -> Version:
    """Make `candidate` the champion; the champion of before becomes `previous_champion`. Idempotent.

    Args:
        candidate: the version whose evidence was judged.
        base: the champion it was compared with, None when there was none.
        files_hash: weights hash of the export's files now.
    Raises:
        RegistryConflict: the champion is neither `base` nor `candidate`, or the files are not those evaluated.
    """
    raise NotImplementedError


def reject(candidate: Version, decision: Decision) -> None:
    """Keep the reason as tags, and take the alias `candidate` away if it still points here. Idempotent."""
    raise NotImplementedError


def rollback(model: str, decision: Decision, *, to: str | None = None) -> Version:
    """Point `champion` at `previous_champion` (or at version `to`) and remember the one left.

    Raises:
        RegistryConflict: there is nothing to go back to.
    """
    raise NotImplementedError
