"""The report of a run: curves, before and after, samples. One HTML file that needs nothing else, and PNGs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class ReportSources:
    """Files a report is made of; what is absent is left out of it."""

    title: str
    metrics: Sequence[Path]
    """`metrics.jsonl` of the stages, in order."""
    evaluation: Path | None = None
    """`evaluation.json` with the models before and after."""
    samples: Path | None = None
    """`samples.jsonl` of the same evaluation."""
    before: str = "base"
    """Model names in the evaluation."""
    after: str = "candidate"
    facts: dict[str, str] = field(default_factory=dict)
    """Shown at the top: model, algorithm, seed, machine, duration, links."""
    gate_markdown: str = ""


def write_report(sources: ReportSources, out_dir: Path) -> dict[str, Path]:
    """Write `report.html` and the PNGs into `out_dir`.

    Returns:
        `html` and one entry per chart.
    Raises:
        DataError: no metrics at all.
    """
    raise NotImplementedError
