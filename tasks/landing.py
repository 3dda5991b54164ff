"""Prompts that land: files below a watched prefix become checked, frozen training prompts, every content once.

A file is read when nothing has changed in it between two looks and it either has a done marker or has been unchanged
for a while. What it holds is then copied below RATCHET_STORE under the hash of its content, so that what was landed is
what is trained on, whatever becomes of the file.

    STORE/prompts/inbox.json                  what was seen of each file at the last look, and what became of it
    STORE/prompts/landed/HASH/NAME.jsonl      the copy
    STORE/prompts/landed/HASH/landed.json     `Landed`, written last: with it, the content has landed
    STORE/prompts/landed/HASH/announced       the asset event has been sent
"""

import logging
import re
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from airflow.sdk.exceptions import AirflowFailException

from engine import store
from engine.errors import SpecError, StoreError
from engine.rows import BadRow, check_row, read_lines
from engine.spec import FileSource, PrepareSpec
from engine.spec.base import URI, Spec
from tasks import deployment, stages
from tasks.assets import PROMPTS
from tasks.operators import airflow_errors, skip

SUFFIXES = (".jsonl", ".jsonl.gz")
TEMPORARY = re.compile(r"(^|/)[._]|[.](tmp|temp|part|partial|incomplete)([.]|$)")
"""Names of files, or of folders they lie in, that a writer uses until it is done."""
DONE_SUFFIX, DONE_FILE = ".done", "_SUCCESS"
"""`x.jsonl.done` beside `x.jsonl`, or `_SUCCESS` in its folder: its writer says that it is whole."""
MAX_BAD_SHARE: float = PrepareSpec.model_fields["max_bad_share"].default
"""A file with more bad rows than `prepare` takes by default is refused."""
RECORD_FILE, ANNOUNCED_FILE = "landed.json", "announced"

log = logging.getLogger(__name__)


class Seen(Spec):
    """One file below the prefix."""

    bytes: int
    modified: float
    """By the store's clock, in seconds since the epoch."""
    since: float
    """By ours: when it was first seen with this size and time."""
    outcome: Literal["waiting", "landed", "repeated", "refused"] = "waiting"
    """repeated: another file with this content landed before."""
    reason: str = ""
    run_id: str = ""
    """DAG run whose look found the outcome."""


class Inbox(Spec):
    """What the looks have seen so far. Losing it costs one more reading of every file, nothing lands twice."""

    prefixes: dict[str, dict[str, Seen]] = {}
    """By prefix and by the file's name below it."""


class Landed(Spec):
    """A file that has landed."""

    uri: URI
    """The copy, which nobody changes."""
    source: URI
    """Where it was found."""
    sha256: str
    rows: int
    bad_rows: int
    """Of `rows`: `prepare` will leave them out."""
    landed_at: float
    """Seconds since the epoch."""
    run_id: str
    """DAG run of `land_prompts`."""


def look(**context: Any) -> dict[str, Any]:
    """Look at the prefix once, take the files that are whole, and announce what has landed and is not announced yet.

    Raises:
        AirflowSkipException: there is nothing to announce, with what is waiting.
    """
    with airflow_errors():
        params, ti = context["params"], context["ti"]
        prefix = _prefix(params.get("prefix"))
        inbox = _read_inbox()
        before = inbox.prefixes.get(prefix, {})
        files, ready = compare(before, store.stat_files(prefix), time.time(), params["settle_s"])
        for name in ready:
            files[name] = _take_in(prefix, name, files[name], ti.run_id)
        _write_inbox(inbox, prefix, files)
        # The next task fails for them: here that would keep the good files from being announced.
        mine = {name: seen for name, seen in files.items() if seen.run_id == ti.run_id}
        ti.xcom_push(key="refused", value={
            name: seen.reason for name, seen in mine.items() if seen.outcome == "refused"})
        new = landed(only_new=True)
        if not new:
            waiting = [name for name, seen in files.items() if seen.outcome == "waiting"]
            skip(f"{prefix}: nothing landed; {len(files)} files there, waiting: {waiting[:20]}")
        context["outlet_events"][PROMPTS].extra = {
            "uris": [record.uri for record in new], "sha256": [record.sha256 for record in new],
            "rows": sum(record.rows - record.bad_rows for record in new)}
        return {"landed": [record.uri for record in new]}


def report(**context: Any) -> None:
    """Note that the event was sent; then fail if files were refused, so that somebody looks at them.

    An event whose note is missing is sent again by the next look: subscribers may see a file twice, never not at all.

    Raises:
        AirflowFailException: the refused files of this look, with reasons.
    """
    with airflow_errors():
        ti = context["ti"]
        announced = ti.xcom_pull(task_ids="look")
        for uri in announced["landed"] if announced else ():
            store.write_bytes(store.join(uri.rsplit("/", 1)[0], ANNOUNCED_FILE), "")
        refused = ti.xcom_pull(task_ids="look", key="refused")
        if refused:
            raise AirflowFailException("refused: " + "; ".join(f"{name}: {why}" for name, why in refused.items()))
        if not announced:
            skip("nothing landed and nothing was refused")


def compare(before: Mapping[str, Seen], found: Iterable[store.StoredFile], now_s: float,
            settle_s: float) -> tuple[dict[str, Seen], list[str]]:
    """What is known after a look, and the names of the files that may be read now.

    Args:
        before: what was known; files that are gone are forgotten.
        found: all files below the prefix.
        now_s: this machine's time. The store's is only compared with itself: its clock may differ, and copies may keep
            the time of their original.
        settle_s: a file without a done marker must have been seen unchanged for so long.
    """
    found = list(found)
    names = {file.name for file in found}
    after, ready = {}, []
    for file in found:
        if not is_prompts(file.name):
            continue
        old = before.get(file.name)
        if old is None or (old.bytes, old.modified) != (file.bytes, file.modified):
            after[file.name] = Seen(bytes=file.bytes, modified=file.modified, since=now_s)
            continue
        after[file.name] = old
        if old.outcome == "waiting" and (is_marked(file.name, names) or now_s - old.since >= settle_s):
            ready.append(file.name)
    return after, ready


def is_prompts(name: str) -> bool:
    """Whether a file of this name is one to land: JSON lines, and no writer's temporary name."""
    return name.endswith(SUFFIXES) and not TEMPORARY.search(name)


def is_marked(name: str, names: set[str]) -> bool:
    """Whether a done marker for the file is among the names."""
    folder = name.rpartition("/")[0]
    return f"{name}{DONE_SUFFIX}" in names or (f"{folder}/{DONE_FILE}" if folder else DONE_FILE) in names


def check_file(path: Path, name: str) -> tuple[int, int]:
    """Rows of a local file of prompts and the bad ones among them.

    Raises:
        ValueError: what is wrong with it, in one line: no rows, or too many bad ones.
    """
    source = FileSource(uri=name)
    rows, bad, first = 0, 0, ""
    with open(path, "rb") as stream:
        for row in read_lines(name, stream):
            # Whether the tokenizer knows chat changes what a prompt becomes, not whether it is one.
            outcome = row if isinstance(row, BadRow) else check_row(row, source, chat=True)
            rows += 1
            if isinstance(outcome, BadRow):
                bad += 1
                first = first or f"line {outcome.line}: {outcome.reason}"
    if not rows:
        raise ValueError("no rows")
    if bad > MAX_BAD_SHARE * rows:
        raise ValueError(f"{bad} of {rows} rows are bad ({bad / rows:.2%}, allowed {MAX_BAD_SHARE:.0%}), first {first}")
    return rows, bad


def landed(*, only_new: bool = False) -> list[Landed]:
    """The files that have landed, oldest first; with `only_new` those that are not announced yet."""
    folder = _folder("landed")
    names = set(store.list_files(folder))
    hashes = [name.split("/")[0] for name in names if name.endswith(f"/{RECORD_FILE}")]
    found = [Landed.model_validate_json(store.read_bytes(store.join(folder, digest, RECORD_FILE)))
             for digest in hashes if not (only_new and f"{digest}/{ANNOUNCED_FILE}" in names)]
    return sorted(found, key=lambda record: (record.landed_at, record.sha256))


def _take_in(prefix: str, name: str, seen: Seen, run_id: str) -> Seen:
    """Read a file that is whole, by all we know, and say what became of it."""
    uri = store.join(prefix, name)
    with tempfile.TemporaryDirectory(prefix="ratchet-landing-") as directory:
        path = Path(directory, PurePosixPath(name).name)
        try:
            store.download_file(uri, path)
            now = {file.name: (file.bytes, file.modified) for file in store.stat_files(prefix)}
        except StoreError as error:
            log.warning("%s: cannot be read now, the next look tries again: %s", name, error)
            return seen
        if now.get(name) != (seen.bytes, seen.modified):
            log.info("%s: changed while it was read, so it is still being written", name)
            return seen
        try:
            rows, bad = check_file(path, name)
        except ValueError as wrong:
            log.error("%s: refused: %s", name, wrong)
            return seen.model_copy(update={"outcome": "refused", "reason": str(wrong), "run_id": run_id})
        return _land(path, seen, Landed(
            uri=_folder("landed"), source=uri, sha256=store.sha256_file(path), rows=rows, bad_rows=bad,
            landed_at=time.time(), run_id=run_id))


def _land(path: Path, seen: Seen, record: Landed) -> Seen:
    """Copy the content of a good file, unless it has landed before."""
    folder = store.join(record.uri, record.sha256[:16])
    where = store.join(folder, RECORD_FILE)
    if store.exists(where):
        first = Landed.model_validate_json(store.read_bytes(where))
        if first.source != record.source:
            log.warning("%s: has the content of %s, which landed before", record.source, first.source)
            return seen.model_copy(update={
                "outcome": "repeated", "reason": f"the content of {first.source}", "run_id": record.run_id})
        return seen.model_copy(update={"outcome": "landed", "run_id": first.run_id})
    copy = store.join(folder, path.name)
    store.upload_file(path, copy)
    store.write_bytes(where, record.model_copy(update={"uri": copy}).model_dump_json(indent=1))
    log.info("%s: %d rows (%d of them bad) landed as %s", record.source, record.rows, record.bad_rows, copy)
    return seen.model_copy(update={"outcome": "landed", "run_id": record.run_id})


def _prefix(asked: str | None) -> str:
    prefix = stages.absolute_uri(asked, str(deployment.home())) if asked else deployment.prompts()
    if not prefix:
        raise SpecError("prefix: nothing to watch; set RATCHET_PROMPTS for all of Airflow, or give a prefix")
    prefix, own = prefix.rstrip("/"), _folder("landed")
    if f"{prefix}/".startswith(f"{own}/") or own.startswith(f"{prefix}/"):
        raise SpecError(f"prefix: {prefix} and {own}, where landed files are kept, overlap; watch another place")
    return prefix


def _folder(*parts: str) -> str:
    return store.join(deployment.store(), "prompts", *parts)


def _read_inbox() -> Inbox:
    where = _folder("inbox.json")
    return Inbox.model_validate_json(store.read_bytes(where)) if store.exists(where) else Inbox()


def _write_inbox(inbox: Inbox, prefix: str, files: dict[str, Seen]) -> None:
    if inbox.prefixes.get(prefix) != files:
        after = Inbox(prefixes={**inbox.prefixes, prefix: files})
        store.write_bytes(_folder("inbox.json"), after.model_dump_json(indent=1))
