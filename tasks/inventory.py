"""What a deployment holds (runs, job directories, exports, cache entries) and what refers to it: facts for a plan."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from engine import store
from engine.errors import FaultError, MissingError
from engine.spec.job import RESULT_FILE, SPEC_FILE
from tasks import deployment, jobs, launchers, registry_search, runs
from tasks.registry import Version
from tasks.retention import Facts, Item, Kind, Reference

DISPOSABLE = ("rejected", "replaced", "rolled_back")
"""Status of a version whose files may go; every other one is waited for or in production."""
DOOMED = ".deleting-"
"""Begins the name of a local directory that is being deleted."""
ACTIVE = ["queued", "running"]
COUNTED_AT_ONCE = 50


@dataclass
class Run:
    """One DAG run, by what it left in the store and among the job directories."""

    key: str
    """`DAG/RUN`, as file names."""
    bytes: dict[str, int] = field(default_factory=dict)
    """By kind; `other` is what is always kept."""
    written: float = 0.0
    """When something was written last, seconds since the epoch."""
    gpu_seconds: float = 0.0
    """Of its finished jobs."""
    items: dict[str, tuple[Kind, int]] = field(default_factory=dict)
    """Kind and bytes by URI."""


class ActiveRuns:
    """Which DAG runs are queued or running, by counting: Airflow tells a task no more."""

    def __init__(self, count: Callable[..., int]):
        """Args: count: `RuntimeTaskInstance.get_dr_count`."""
        self._count = count

    def any(self, dag_id: str) -> bool:
        """Whether the DAG has such a run."""
        return self._count(dag_id=dag_id, states=ACTIVE) > 0

    def among(self, dag_id: str, run_ids: list[str]) -> set[str]:
        """Those of these runs."""
        parts = [run_ids[start : start + COUNTED_AT_ONCE] for start in range(0, len(run_ids), COUNTED_AT_ONCE)]
        return {run for part in parts for run in self._halve(dag_id, part)}

    def _halve(self, dag_id: str, run_ids: list[str]) -> set[str]:
        number = self._count(dag_id=dag_id, run_ids=run_ids, states=ACTIVE)
        if number in (0, len(run_ids)):
            return set(run_ids) if number else set()
        half = len(run_ids) // 2
        return self._halve(dag_id, run_ids[:half]) | self._halve(dag_id, run_ids[half:])


class Inventory:
    """The deployment that the environment names."""

    def __init__(self, active: ActiveRuns):
        self.home = canonical(str(deployment.home()))
        self.store = canonical(deployment.store())
        self._active = active
        self._run_ids: dict[str, str] = {}

    def facts(self, now: float) -> tuple[Facts, dict[str, Run]]:
        """Everything that the plan needs, and the runs by key.

        Args: now: seconds since the epoch.
        Raises:
            FaultError: the store or MLflow does not answer, or a file that names others cannot be read.
        """
        versions, found = registry_search.every_version(), self.runs()
        decided = {canonical(v.export_uri): v for v in versions if v.export_uri and v.status in DISPOSABLE}
        for run in found.values():
            times = [decided_at(decided[uri], versions) for uri in run.items if uri in decided]
            run.written = max(run.written, *times, 0.0)
        items = [_item(run, uri, decided.get(uri)) for run in found.values() for uri in run.items]
        return Facts((*items, *self._cache_entries()), self.references(versions), now), found

    def runs(self) -> dict[str, Run]:
        """Every run by key. Lists all files of the store's runs and of the job directories."""
        found: dict[str, Run] = {}
        for base, classify in ((f"{self.store}/runs", _item_in_store), (f"{self.home}/jobs", _item_of_jobs)):
            for file in store.stat_files(base):
                parts = file.name.split("/")
                if len(parts) < 3:
                    continue
                key = f"{parts[0]}/{parts[1].removeprefix(DOOMED)}"
                run = found.setdefault(key, Run(key))
                kind, place = classify(parts)
                run.written = max(run.written, file.modified)
                run.bytes[kind or "other"] = run.bytes.get(kind or "other", 0) + file.bytes
                if kind:
                    before = run.items.get(f"{base}/{place}", (kind, 0))[1]
                    run.items[f"{base}/{place}"] = (kind, before + file.bytes)
        for run in found.values():
            results = (_read_json(job / RESULT_FILE) or {} for job in self._job_directories(run.key))
            run.gpu_seconds = sum(float(result.get("gpu_seconds", 0.0)) for result in results)
        return found

    def references(self, versions: list[Version] | None = None) -> tuple[Reference, ...]:
        """Everything that must not be touched, as it is now. Lists directories, not their files."""
        versions = registry_search.every_version() if versions is None else versions
        return tuple(Reference(uri, why) for why, uris in self._referring(versions) for uri in uris)

    def _referring(self, versions: Iterable[Version]) -> Iterator[tuple[str, list[str]]]:
        for version in versions:
            why = why_kept(version)
            places = [canonical(uri) for uri in (version.export_uri, version.tags.get("ratchet.run")) if uri]
            if why:
                yield why, [uri for place in places for uri in self._of_root(place)]
        for key in self._active_runs():
            specs = [uri for job in self._job_directories(key) for uri in self._named_in(job / SPEC_FILE)]
            yield f"{key} has not ended", self._of_root(f"{self.store}/runs/{key}") + specs
        for directory in jobs.running(Path(self.home), launchers.configured()):
            yield f"the job in {directory} runs", [str(directory), *self._named_in(directory / SPEC_FILE)]

    def _of_root(self, root: str) -> list[str]:
        """A run's own places, and those that its files name: the model it started from, its prompts."""
        key = root.removeprefix(f"{self.store}/runs/")
        if key.count("/") != 1:
            return [root]  # an export, or what was made elsewhere
        return [root, f"{self.home}/jobs/{key}", *(
            uri for name in (runs.RUN_FILE, runs.CANDIDATE_FILE) for uri in self._named_in(store.join(root, name)))]

    def _named_in(self, uri: str | Path) -> list[str]:
        """The places of this deployment that a JSON file names anywhere in it; none when there is no such file."""
        try:
            content = json.loads(store.read_bytes(uri))
        except MissingError:
            return []
        except ValueError as error:
            raise FaultError(f"{uri}: not JSON ({error}); what it refers to is unknown, so nothing is deleted: "
                             "mend it, or remove it") from None
        places = map(canonical, filter(_is_place, _strings(content)))
        return [place for place in places if place.startswith((f"{self.store}/", f"{self.home}/"))]

    def _active_runs(self) -> list[str]:
        """Keys of the runs that have not ended; of those that nothing names, all while their DAG has any."""
        active = []
        for dag in {*store.list_dirs(f"{self.store}/runs"), *store.list_dirs(f"{self.home}/jobs")}:
            if not self._active.any(dag):
                continue
            places = (f"{self.store}/runs/{dag}", f"{self.home}/jobs/{dag}")
            keys = sorted({f"{dag}/{name.removeprefix(DOOMED)}" for place in places for name in store.list_dirs(place)})
            named = {key: run_id for key in keys if (run_id := self._run_id(key))}
            running = self._active.among(dag, list(named.values()))
            active += [key for key in keys if key not in named or named[key] in running]
        return active

    def _run_id(self, key: str) -> str:
        """Airflow's id of a run: its name as a directory may be shortened. Empty when no file says it."""
        if key not in self._run_ids:
            files = [f"{self.store}/runs/{key}/{runs.RUN_FILE}",
                     *(str(job / jobs.TASK_FILE) for job in self._job_directories(key))]
            said = next((found for file in files if (found := _read_json(file)) and "run_id" in found), None)
            if said is None:
                return ""
            self._run_ids[key] = said["run_id"]
        return self._run_ids[key]

    def _job_directories(self, key: str) -> list[Path]:
        below = Path(self.home, "jobs", key)
        return sorted({path.parent for depth in ("*", "*/*") for path in below.glob(f"{depth}/{SPEC_FILE}")})

    def _cache_entries(self) -> list[Item]:
        base = canonical(runs.evaluation_cache())
        entries: dict[str, Item] = {}
        for file in store.stat_files(base):
            name, _, rest = file.name.partition("/")
            before = entries.get(name, Item("evaluations", f"{base}/{name}", "", 0, 0.0))
            if rest:
                entries[name] = Item("evaluations", before.uri, "", before.bytes + file.bytes,
                                     max(before.modified, file.modified), leftover=name.startswith(DOOMED))
        return list(entries.values())


def why_kept(version: Version) -> str | None:
    """Why the files of a registered version are kept; None when they may go."""
    if version.aliases:
        return f"{', '.join(version.aliases)} of {version.label}"
    if version.status not in DISPOSABLE:
        return f"{version.label} is {version.status or 'a version that was not decided on'}"
    return None


def canonical(uri: str) -> str:
    """One spelling for each place: an absolute path without symbolic links, or an `s3://` URI without a last slash."""
    return uri.rstrip("/") if "://" in uri else os.path.realpath(uri)


def decided_at(version: Version, versions: Iterable[Version]) -> float:
    """When a version was decided on or, if later, replaced by the next; seconds since the epoch, 0 when unknown."""
    successor = version.tags.get("ratchet.replaced_by")
    times = [version.tags.get("ratchet.decided_at", ""), *(
        other.tags.get("ratchet.decided_at", "") for other in versions
        if other.model == version.model and other.version == successor)]
    return max((datetime.fromisoformat(at).timestamp() for at in times if at), default=0.0)


def _item(run: Run, uri: str, version: Version | None) -> Item:
    kind, size = run.items[uri]
    return Item(kind, uri, run.key, size, run.written, leftover=uri.rsplit("/", 1)[-1].startswith(DOOMED),
                version=version.label if version else "", status=version.status if version else "")


def _item_in_store(parts: list[str]) -> tuple[Kind | None, str]:
    """Kind and place of the item that a file of `STORE/runs` belongs to; None when it is always kept."""
    kinds: tuple[tuple[int, str, Kind], ...] = (
        (3, "prompts", "prompts"), (4, "checkpoints", "checkpoints"), (4, "export", "exports"))
    for depth, name, kind in kinds:
        # `checkpoints.2` was put aside when its job was replaced.
        if len(parts) > depth and parts[depth - 1].removeprefix(DOOMED).split(".")[0] == name:
            return kind, "/".join(parts[:depth])
    return None, ""


def _item_of_jobs(parts: list[str]) -> tuple[Kind | None, str]:
    return "jobs", "/".join(parts[:2])


def _read_json(uri: str | Path) -> Mapping[str, Any] | None:
    """The JSON object in a file of this machine or of the store; None when it is absent or torn.

    A store that does not answer is an error: what a file says must not look like nothing.
    """
    try:
        content = json.loads(store.read_bytes(uri))
    except (MissingError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)


def _is_place(text: str) -> bool:
    return text.startswith(("/", "s3://")) and "\n" not in text
