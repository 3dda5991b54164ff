"""Spec of the report stage: files of earlier stages in, one HTML page and PNGs out."""

from typing import Literal

from pydantic import Field

from engine.spec.base import URI, Spec
from engine.spec.tracking import TrackingSpec

VERDICT_SLOT = ("<!--verdict-->", "<!--/verdict-->")
GATE_SLOT = ("<!--gate-->", "<!--/gate-->")
"""Begin and end of the page's places for the verdict (beside its title) and the table of the gate. They are empty when
the report is made: the review, which comes later, fills them."""


class ReportSpec(Spec):
    """What the report of a run is made of; what is not given is left out of it."""

    stage: Literal["report"] = "report"
    schema_version: Literal[1] = 1
    title: str = Field(min_length=1)
    metrics: list[URI] = Field(min_length=1)
    """`metrics.jsonl` of the train stages, in order."""
    results: list[URI] = []
    """`result.json` of all stages, in order: the table of time and cost."""
    evaluation: URI | None = None
    """`evaluation.json` with the models before and after."""
    samples: URI | None = None
    """`samples.jsonl` of the same evaluation."""
    before: str = "base"
    """Name of the model before training in the evaluation."""
    after: str = "candidate"
    """Name of the trained model in the evaluation."""
    facts: dict[str, str] = {}
    """Shown at the top: model, algorithm, seed, machine, links (a value that is a http address becomes a link)."""
    gpu_hour_price: float | None = Field(None, ge=0)
    """Price of one GPU for one hour, in any currency; None: no cost column."""
    output: URI
    """Directory for `report.html` and the PNGs."""
    tracking: TrackingSpec = TrackingSpec()
    """The run that the report is logged to."""
