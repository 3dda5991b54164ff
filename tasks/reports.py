"""The report after the review: the engine wrote it before there was a verdict."""

import contextlib

from engine.errors import FaultError, MissingError
from engine.store import join, read_text, write_bytes
from tasks import cards, runs, tracking

REPORT = ("report", "report.html")


def report_uri(root: str) -> str:
    """Where the report of a run is."""
    return join(root, *REPORT)


def publish_verdict(root: str) -> bool:
    """Put the gate's table into a run's report and log the page to MLflow once more; idempotent.

    A report is no reason to fail a review: without the report, or while the store or MLflow does not answer, nothing
    happens, and the next call does it.

    Returns:
        Whether the report in MLflow has the verdict now.
    """
    verdict = runs.read_review(root)
    if verdict is None:
        return False
    with contextlib.suppress(FaultError):
        page = cards.with_gate(read_text(report_uri(root)), verdict)
        write_bytes(report_uri(root), page)
        tracking.log_text(runs.read_run(root).tracking, page, "/".join(REPORT))
        return True
    return False


def read_report(root: str) -> str | None:
    """The page, with the verdict of the review when there is one; None before the report is written."""
    try:
        page = read_text(report_uri(root))
    except MissingError:
        return None
    verdict = runs.read_review(root)
    return page if verdict is None else cards.with_gate(page, verdict)
