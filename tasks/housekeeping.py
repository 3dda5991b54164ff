"""What DAG `housekeeping` does: plan what may be deleted, say it, and delete it when asked to.

Nothing is believed for long: what refers to a place is asked again just before it is deleted, so a promotion or a run
that begins in between keeps it. A deletion that is killed leaves a directory under another name (local) or one without
its manifests (S3); neither looks whole, and the next run completes it.
"""

import contextlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine import store
from engine.errors import StoreError
from engine.spec.job import SPEC_FILE
from tasks import deployment, jobs, launchers, registry_search
from tasks.inventory import DOOMED, ActiveRuns, Inventory, Run, why_kept
from tasks.jobs import safe_name
from tasks.operators import airflow_errors, skip
from tasks.retention import Action, Guard, Item, Policy, plan

PLAN_FILE, OUTCOME_FILE, REPORT_FILE, USAGE_FILE = "plan.json", "outcome.json", "report.md", "usage.json"
ROWS_SHOWN = 10
"""Rows of each table that travel through XCom; the file has all."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What became of a deletion that the plan asked for."""

    item: Item
    deleted: bool
    reason: str


def look(**context: Any) -> dict[str, Any]:
    """Plan the deletions; write plan, report and usage to the store. Touches nothing else."""
    with airflow_errors():
        params, ti = context["params"], context["ti"]
        policy = Policy(int(params["keep_runs"]), float(params["keep_days"]), frozenset(params["what"]))
        facts, runs = Inventory(ActiveRuns(ti.get_dr_count)).facts(time.time())
        actions = plan(facts, policy)
        store.write_bytes(store.join(folder(ti.run_id), PLAN_FILE), json.dumps([asdict(a) for a in actions], indent=1))
        planned = [Outcome(action.item, False, action.reason) for action in actions if action.delete]
        return {**_publish(context, "Would be deleted", planned, runs, kept_table(actions)),
                "to_delete": len(planned), "bytes": sum(outcome.item.bytes for outcome in planned)}


def carry_out(**context: Any) -> dict[str, Any]:
    """Delete what this run's plan lists, unless it is a dry run or something refers to it by now."""
    with airflow_errors():
        where = folder(context["ti"].run_id)
        if context["params"]["dry_run"]:
            skip(f"dry run: nothing was deleted; {where}/{REPORT_FILE} lists what would be")
        inventory = Inventory(ActiveRuns(context["ti"].get_dr_count))
        take_back_marks()
        outcomes: list[Outcome] = []
        for outcome in delete(read_plan(store.join(where, PLAN_FILE)), inventory):
            outcomes.append(outcome)
            log.info("%s %s (%s): %s", "Deleted" if outcome.deleted else "Kept", outcome.item.uri,
                     size(outcome.item.bytes), outcome.reason)
            store.write_bytes(store.join(where, OUTCOME_FILE), json.dumps([asdict(o) for o in outcomes], indent=1))
        gone = [outcome for outcome in outcomes if outcome.deleted]
        return {**_publish(context, "Deleted", outcomes, inventory.runs(), ""),
                "deleted": len(gone), "bytes": sum(outcome.item.bytes for outcome in gone)}


def folder(run_id: str) -> str:
    """Where a run of housekeeping keeps its plan and report."""
    return store.join(deployment.store(), "housekeeping", safe_name(run_id))


def read_plan(uri: str) -> list[Action]:
    """The actions of a plan that `look` wrote."""
    return [Action(Item(**action.pop("item")), **action) for action in json.loads(store.read_bytes(uri))]


def delete(actions: Iterable[Action], inventory: Inventory) -> Iterator[Outcome]:
    """Carry out the deletions of a plan, one after the other; each is checked again just before.

    Raises:
        FaultError: the store or MLflow does not answer; nothing is deleted without asking it.
    """
    for action in actions:
        if not action.delete:
            continue
        item = action.item
        if item.version:
            # Before the last look: who makes this version the champion meanwhile is seen there, or sees the mark.
            registry_search.mark_deleted(item.version, datetime.now(UTC).isoformat(timespec="seconds"))
        kept = Guard(inventory.references()).why_kept(item.uri)
        if kept is None and not remove(item):
            kept = "a job runs in it"
        if kept is not None and item.version:
            registry_search.mark_deleted(item.version, "")
        yield Outcome(item, kept is None, action.reason if kept is None else f"kept after all: {kept}")


def take_back_marks() -> None:
    """Remove the mark of versions that a killed deletion marked but did not delete, and that are in use since."""
    for version in registry_search.every_version():
        if registry_search.EXPORT_DELETED in version.tags and why_kept(version) and store.exists(version.export_uri):
            registry_search.mark_deleted(version.label, "")


def remove(item: Item) -> bool:
    """Delete an item, or the rest of one; False when a job runs in it.

    Raises:
        StoreError: the store or the disk refuses.
    """
    if store.is_s3(item.uri):
        store.delete(item.uri, last="config.json" if item.kind == "exports" else store.MANIFEST)
        return True
    path = Path(item.uri)
    doomed = path if item.leftover else path.with_name(DOOMED + path.name)
    try:
        with contextlib.ExitStack() as held:
            jobs_here = [spec.parent for spec in path.rglob(SPEC_FILE)] if item.kind == "jobs" else []
            launcher = launchers.configured()
            if not all([held.enter_context(jobs.not_running(directory, launcher)) for directory in jobs_here]):
                return False
            if path != doomed and path.exists():
                shutil.rmtree(doomed, ignore_errors=True)
                os.rename(path, doomed)
        if doomed.exists():
            shutil.rmtree(doomed)
    except OSError as error:
        raise StoreError(f"delete {item.uri}: {error.strerror or error}") from None
    return True


def note_usage(runs: Mapping[str, Run]) -> dict[str, dict[str, Any]]:
    """GPU seconds and bytes by run. Kept in the store: what a run cost is known after its jobs were deleted."""
    where = store.join(deployment.store(), "housekeeping", USAGE_FILE)
    usage: dict[str, dict[str, Any]] = json.loads(store.read_bytes(where)) if store.exists(where) else {}
    for known in usage.values():
        known["bytes"] = {}
    for run in runs.values():
        before = usage.get(run.key, {"gpu_seconds": 0.0, "written": 0.0})
        usage[run.key] = {"gpu_seconds": max(before["gpu_seconds"], run.gpu_seconds),
                          "written": max(before["written"], run.written), "bytes": run.bytes}
    store.write_bytes(where, json.dumps(usage, indent=1, sort_keys=True))
    return usage


def _publish(context: Any, title: str, outcomes: list[Outcome], runs: Mapping[str, Run], kept: str) -> dict[str, Any]:
    """Write the report; the head of its tables goes to XCom."""
    usage = note_usage(runs)
    where = store.join(folder(context["ti"].run_id), REPORT_FILE)
    store.write_bytes(where, "\n\n".join(filter(None, [
        f"## {title}", outcome_table(outcomes), kept, "## GPU time and storage of every run", usage_table(usage)])))
    context["ti"].xcom_push(key="table", value="\n\n".join([
        outcome_table(outcomes, ROWS_SHOWN), usage_table(usage, ROWS_SHOWN), f"All of it: {where}"]))
    return {"report": where}


def outcome_table(outcomes: list[Outcome], rows: int | None = None) -> str:
    """Markdown: each deletion with its size and reason."""
    if not outcomes:
        return "Nothing."
    head = f"{len(outcomes)} items, {size(sum(outcome.item.bytes for outcome in outcomes))}\n\n"
    lines = ["| what | where | size | why |", "|---|---|---|---|", *(
        f"| {o.item.kind} | {o.item.uri} | {size(o.item.bytes)} | {o.reason} |" for o in outcomes[:rows])]
    return head + "\n".join(lines)


def kept_table(actions: Iterable[Action]) -> str:
    """Markdown: what is kept, by reason."""
    reasons: dict[str, list[int]] = {}
    for action in actions:
        if not action.delete:
            reasons.setdefault(action.reason, []).append(action.item.bytes)
    lines = [f"| {reason} | {len(sizes)} | {size(sum(sizes))} |"
             for reason, sizes in sorted(reasons.items(), key=lambda entry: -sum(entry[1]))]
    return "\n".join(["## Kept", "", "| why | items | size |", "|---|---|---|", *lines]) if lines else ""


def usage_table(usage: Mapping[str, Mapping[str, Any]], rows: int | None = None) -> str:
    """Markdown: GPU-hours and storage of every run, the newest first."""
    newest = sorted(usage.items(), key=lambda entry: -entry[1]["written"])
    lines = [f"| {key} | {datetime.fromtimestamp(run['written'], UTC):%Y-%m-%d} | {run['gpu_seconds'] / 3600:.2f} "
             f"| {size(sum(run['bytes'].values()))} |" for key, run in newest[:rows]]
    total = (f"| all {len(usage)} runs | | {sum(run['gpu_seconds'] for run in usage.values()) / 3600:.2f} "
             f"| {size(sum(sum(run['bytes'].values()) for run in usage.values()))} |")
    return "\n".join(["| run | last written | GPU-hours | storage |", "|---|---|---|---|", *lines, total])


def size(count: int) -> str:
    """Bytes for a person: `1.5 GB`."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.3g} TB"
