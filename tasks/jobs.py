"""The job directory: submit, adopt, look, kill. The contract is section 4 of docs/design.md.

A directory belongs to one task of one DAG run, whatever its try number; everything about a job can be read from it, by
a task that knows nothing of the one that started it.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from pydantic import ValidationError

from engine import store
from engine.errors import EXIT_FAULT, EXIT_KILLED, EXIT_REFUSED, FaultError, SpecError
from engine.spec import RunResult, RunSpec, TrainingSpec, dump_spec
from engine.spec.job import (
    ATTEMPT_FILE,
    EXIT_FILE,
    HEARTBEAT_FILE,
    JOB_FILE,
    LOG_FILE,
    METRICS_FILE,
    OUTBOX_FILE,
    PROGRESS_FILE,
    RESULT_FILE,
    SENT_FILE,
    SPEC_FILE,
    SPEC_HASH_FILE,
)
from engine.store import write_atomic
from tasks.launchers import Launcher

ATTEMPT_FILES = (JOB_FILE, HEARTBEAT_FILE, LOG_FILE, PROGRESS_FILE, EXIT_FILE, RESULT_FILE)
"""What one attempt leaves; moved to `attempts/N/` before the next. Metrics stay: steps are counted over attempts."""

TASK_FILE = "task.json"
"""DAG, run and task that a directory belongs to: their names in its path may be shortened."""

LONGEST_NAME = 200
"""Characters of an id in a path: file systems take 255, Airflow's ids may be as long."""
HAND_OVER_LIMIT_S = 30.0

STALL_LIMITS_S = {"prepare": 3600, "evaluate": 4 * 3600, "report": 3600}
"""Without a sign of progress for so long a job is ended as hung, where its spec does not say; an evaluation gives one a
model, the others many."""

RUN_FILES = (METRICS_FILE, OUTBOX_FILE, SENT_FILE, "checkpoints", "resumed", "model", "models", "export")
"""What all attempts of one spec add to, and their local copies of what is in an object store."""

Phase = Literal["absent", "running", "done", "failed", "lost"]


@dataclass(frozen=True)
class JobState:
    """What a job directory says about its last attempt."""

    phase: Phase
    """absent: never started; lost: its processes are gone and nobody wrote how it ended."""
    attempt: int = 0
    exit_code: int | None = None
    signal: int | None = None
    leased: bool = True
    """False: it ended because other jobs held the slots."""


@dataclass(frozen=True)
class Submission:
    """What `submit` found or did."""

    state: JobState
    adopted: bool
    """True when the job was there already: running or done."""


def job_directory(home: Path, dag_id: str, run_id: str, task_id: str, map_index: int = -1) -> Path:
    """The directory of one task of one DAG run: `HOME/jobs/DAG/RUN/TASK[/INDEX]`."""
    parts = [safe_name(dag_id), safe_name(run_id), safe_name(task_id)]
    return home.joinpath("jobs", *parts, *([str(map_index)] if map_index >= 0 else []))


def safe_name(name: str) -> str:
    """A file name for an Airflow id; different ids never share one."""
    cleaned = re.sub(r"[^A-Za-z0-9_.-]", "-", name).lstrip(".")
    if cleaned == name and len(name) <= LONGEST_NAME:
        return name
    return f"{cleaned[:LONGEST_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def note_task(directory: Path, **ids: str) -> None:
    """Write which task a directory belongs to; it is made."""
    _make_private(directory)
    write_atomic(directory / TASK_FILE, json.dumps(ids))


def submit(directory: Path, spec: RunSpec, launcher: Launcher, *, force: bool = False) -> Submission:
    """Make sure that a job with this spec runs or is done.

    A running or finished job is adopted. One that failed or was lost gets a new attempt. Another spec in the directory
    is refused, unless the job never got past its spec (exit 2) or `force` is given: then the old job is ended and
    replaced.

    Raises:
        SpecError: the directory holds another spec; names what changed.
        FaultError: the launcher could not start the job.
    """
    _make_private(directory)
    with _locked(directory / "submit.lock"):
        state = state_of(directory, launcher)
        changes = spec_changes(directory, spec)
        settled = state.phase == "absent" or state.exit_code == EXIT_REFUSED
        if changes and not force and not settled:
            raise SpecError(f"{directory} holds a {state.phase} job with another spec: {'; '.join(changes[:5])}; "
                            "run it as a new DAG run, or trigger with `force` to replace it")
        if not changes and state.phase in ("running", "done"):
            return Submission(state, adopted=True)
        launcher.kill(directory)
        # Asked again: the job of a submitter that died may have written its record in between.
        attempt = archive_attempt(directory, state_of(directory, launcher))
        hand_over(directory, attempt)
        if changes:
            start_over(directory, spec, attempt - 1, delete=force)
        text = dump_spec(spec)
        write_atomic(directory / SPEC_FILE, text)
        write_atomic(directory / SPEC_HASH_FILE, hashlib.sha256(text.encode()).hexdigest() + "\n")
        ranks = spec.layout.world_size if isinstance(spec, TrainingSpec) else getattr(spec, "world_size", 1)
        launcher.start(directory, spec.stage, attempt=attempt, ranks=ranks,
                       stall_limit_s=getattr(spec, "stall_limit_s", None) or STALL_LIMITS_S[spec.stage])
        return Submission(state_of(directory, launcher), adopted=False)


def state_of(directory: Path, launcher: Launcher) -> JobState:
    """Read what happened to the last attempt. A torn or missing result of an engine that ended well is a failure."""
    record = read_json(directory / JOB_FILE)
    if record is None:
        return JobState("absent")
    attempt = record["attempt"]
    # Life is looked at before exit.json: the wrapper writes it before it ends, so "dead without it" is final.
    alive = launcher.alive(directory, record)
    ended = read_json(directory / EXIT_FILE)
    if ended is None or ended["attempt"] != attempt:
        return JobState("running" if alive else "lost", attempt)
    code = ended["code"]
    if code == 0 and read_result(directory) is None:
        code = EXIT_FAULT
    return JobState("done" if code == 0 else "failed", attempt, code, ended["signal"], ended.get("leased", True))


def read_result(directory: Path) -> RunResult | None:
    """The result of a finished job; None when there is none or it is torn."""
    try:
        return RunResult.model_validate_json((directory / RESULT_FILE).read_text())
    except (OSError, ValidationError):
        return None


def got_further(directory: Path) -> bool:
    """Whether this attempt, the last one, completed an iteration that no attempt before it had completed."""
    earlier = [_iterations(path) for path in (directory / "attempts").glob("*")]
    return _iterations(directory) > max(earlier, default=0)


def kill(directory: Path, launcher: Launcher) -> None:
    """End every process of a job and write that it was killed. Nothing happens to a job that has ended."""
    if state_of(directory, launcher).phase not in ("running", "lost"):
        return
    launcher.kill(directory)
    state = state_of(directory, launcher)
    if state.phase == "lost":
        write_atomic(directory / EXIT_FILE, json.dumps(
            {"code": EXIT_KILLED, "signal": 9, "attempt": state.attempt, "started": None, "finished": time.time()}))


def running(home: Path, launcher: Launcher, *, or_lost: bool = False) -> list[Path]:
    """Directories of all jobs that run now; `or_lost`: also of those whose processes nobody has ended."""
    found, phases = sorted((home / "jobs").glob(f"*/*/**/{JOB_FILE}")), {"running", *(["lost"] if or_lost else [])}
    return [path.parent for path in found if state_of(path.parent, launcher).phase in phases]


@contextlib.contextmanager
def not_running(directory: Path, launcher: Launcher) -> Iterator[bool]:
    """Whether no job runs in the directory; none begins there before this ends."""
    with open(directory / "submit.lock", "a") as file:
        yield _try_lock(file) and state_of(directory, launcher).phase != "running"


def spec_changes(directory: Path, spec: RunSpec) -> list[str]:
    """`field: old -> new` for each difference between the directory's spec and `spec`; empty when it has none."""
    old = read_json(directory / SPEC_FILE)
    return [] if old is None else differences(old, spec.model_dump(mode="json"))


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """The leaves in which two JSON values differ, as `path: old -> new`."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(k for k in new if k not in old)]
        return [line for key in keys for line in differences(
            old.get(key), new.get(key), f"{where}.{key}" if where else key)]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [line for i, (a, b) in pairs for line in differences(a, b, f"{where}[{i}]")]
    return [] if old == new else [f"{where}: {json.dumps(old)} -> {json.dumps(new)}"]


def archive_attempt(directory: Path, state: JobState) -> int:
    """Move the files of the last attempt away; the number of the next one."""
    if state.attempt:
        target = directory / "attempts" / str(state.attempt)
        target.mkdir(parents=True, exist_ok=True)
        # job.json goes last: until then the attempt's number is known, and a crash in between repeats the moves.
        for name in sorted(ATTEMPT_FILES, key=lambda n: n == JOB_FILE):
            with contextlib.suppress(FileNotFoundError):
                os.replace(directory / name, target / name)
    archived = [int(p.name) for p in (directory / "attempts").glob("*") if p.name.isdigit()]
    return max(archived, default=0) + 1


def start_over(directory: Path, spec: RunSpec, attempt: int, *, delete: bool) -> None:
    """Another spec takes the directory: nothing of the old one's is gone on from, neither metrics nor checkpoints.

    Args:
        directory: holds the old spec.
        spec: the new one.
        attempt: number of the old one's last; what is put aside goes into its directory.
        delete: checkpoints in an object store cannot be put aside: delete those of the old spec, or leave them there
            for the engine to refuse. A directory of checkpoints is put aside, whatever this says.
    """
    target = directory / "attempts" / str(attempt)
    for name in RUN_FILES:
        with contextlib.suppress(FileNotFoundError):
            os.replace(directory / name, target / name)
    if not isinstance(spec, TrainingSpec):
        return
    if store.is_s3(spec.checkpoint_dir):
        # Only what this very job wrote: whatever else the new spec points to is somebody else's.
        if delete and (read_json(directory / SPEC_FILE) or {}).get("checkpoint_dir") == spec.checkpoint_dir:
            store.delete(spec.checkpoint_dir)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.replace(spec.checkpoint_dir, f"{spec.checkpoint_dir}.{attempt}")


def hand_over(directory: Path, attempt: int) -> None:
    """From here on only this attempt may commit anything; one that comes back from elsewhere finds its number gone.

    Raises:
        FaultError: an earlier attempt is in the middle of a commit and does not end it.
    """
    deadline = time.monotonic() + HAND_OVER_LIMIT_S
    with open(directory / ATTEMPT_FILE, "a+") as file:
        while not _try_lock(file):
            if time.monotonic() > deadline:
                raise FaultError(f"{directory}: an earlier attempt has held {ATTEMPT_FILE} for more than "
                                 f"{HAND_OVER_LIMIT_S:.0f} s; look for its process, also on other hosts")
            time.sleep(0.05)
        file.truncate(0)
        file.write(f"{attempt}\n")
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None when the file is absent or torn."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _iterations(attempt: Path) -> int:
    """Iterations of the stage that were complete when an attempt ended; those it resumed from included."""
    return (read_json(attempt / PROGRESS_FILE) or {}).get("iteration", 0)


def _make_private(directory: Path) -> None:
    # Specs, logs and samples may quote private data: nobody but the owner enters.
    for path in (*reversed([p for p in directory.parents if not p.exists()]), directory):
        path.mkdir(mode=0o700, exist_ok=True)
    os.chmod(directory, 0o700)


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
