"""Which files of old runs may go. Pure functions: facts and a policy in, one decision for each item out.

An item is what is deleted or kept as one: the job directories of a run, the checkpoints of one of its stages, an
export, its prepared prompts, an entry of the evaluation cache. What a run was (`run.json`, `candidate.json`,
`lineage.json`, its review and its report) is no item: it is small, and the lineage of later models goes through it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["jobs", "checkpoints", "exports", "prompts", "evaluations"]
KINDS: tuple[Kind, ...] = get_args(Kind)
DAY_S = 86400.0


@dataclass(frozen=True)
class Item:
    """What is deleted or kept as one."""

    kind: Kind
    uri: str
    """Canonical: see `tasks.inventory.canonical`."""
    run: str
    """`DAG/RUN`, both as file names; empty for the evaluation cache, which all runs share."""
    bytes: int
    modified: float
    """When its newest file was written, seconds since the epoch."""
    version: str = ""
    """`name/3` when it is the export of a registered version that was decided on."""
    status: str = ""
    """What was decided: `rejected`, `replaced` or `rolled_back`."""
    leftover: bool = False
    """A deletion of it was interrupted: nothing finds it any more under its own name."""


@dataclass(frozen=True)
class Reference:
    """Something that must not be touched, nor anything below it or above it."""

    uri: str
    why: str
    """For a person: `champion of tiny/3`."""


@dataclass(frozen=True)
class Facts:
    """What there is."""

    items: tuple[Item, ...]
    references: tuple[Reference, ...]
    now: float
    """Seconds since the epoch."""


@dataclass(frozen=True)
class Policy:
    """What to keep."""

    keep_runs: int = 10
    """Newest runs of every DAG that keep everything."""
    keep_days: float = 30.0
    """Runs and cache entries in which something was written within so many days keep everything."""
    what: frozenset[Kind] = frozenset({"jobs", "checkpoints", "exports", "evaluations"})
    """Kinds that may be deleted at all."""


@dataclass(frozen=True)
class Action:
    """The decision about one item."""

    item: Item
    delete: bool
    reason: str


class Guard:
    """Answers whether a place is referenced."""

    def __init__(self, references: Iterable[Reference]):
        self._named: dict[str, str] = {}
        self._above: dict[str, str] = {}
        for reference in references:
            self._named.setdefault(reference.uri, reference.why)
            for parent in _parents(reference.uri):
                self._above.setdefault(parent, reference.why)

    def why_kept(self, uri: str) -> str | None:
        """Why nothing at `uri` may be touched: it, something below it or something above it is referenced."""
        for place in (uri, *_parents(uri)):
            if place in self._named:
                return self._named[place]
        return self._above.get(uri)


def plan(facts: Facts, policy: Policy) -> list[Action]:
    """One action an item, deletions first, each with its reason."""
    guard = Guard(facts.references)
    last_written: dict[str, float] = {}
    for item in facts.items:
        if item.leftover:
            continue  # It was given up; that it is not quite gone makes its run no younger.
        last_written[item.run] = max(item.modified, last_written.get(item.run, item.modified))
    newest = newest_runs(last_written, policy.keep_runs)

    def decide(item: Item) -> Action:
        kept = guard.why_kept(item.uri)
        if kept:
            return Action(item, False, f"referenced: {kept}")
        if item.leftover:
            return Action(item, True, "an earlier deletion of it was interrupted")
        if item.kind not in policy.what:
            return Action(item, False, f"{item.kind} are not to be deleted")
        if item.run in newest:
            return Action(item, False, f"among the newest {policy.keep_runs} runs of {item.run.split('/')[0]}")
        written = last_written[item.run] if item.run else item.modified
        days = (facts.now - written) / DAY_S
        if days < policy.keep_days:
            return Action(item, False, f"written {days:.1f} days ago, kept for {policy.keep_days:g}")
        return Action(item, True, _reason(item, days, policy))

    actions = [decide(item) for item in facts.items]
    return sorted(actions, key=lambda action: (not action.delete, -action.item.bytes, action.item.uri))


def newest_runs(last_written: dict[str, float], count: int) -> set[str]:
    """The `count` runs of each DAG in which something was written last.

    Args: last_written: seconds since the epoch by `DAG/RUN`; the key without a run is none.
    """
    of_dag: dict[str, list[str]] = {}
    for run in sorted(filter(None, last_written), key=lambda run: (-last_written[run], run)):
        of_dag.setdefault(run.split("/")[0], []).append(run)
    return {run for runs in of_dag.values() for run in runs[:count]}


def _reason(item: Item, days: float, policy: Policy) -> str:
    if not item.run:
        return f"written {days:.0f} days ago; it is made again when it is needed"
    reason = f"the run ended {days:.0f} days ago and is not among the newest {policy.keep_runs}"
    if item.kind == "exports":
        reason += f"; {item.version} was {item.status}" if item.version else "; never registered"
    return reason


def _parents(uri: str) -> list[str]:
    """`/a/b/c` gives `/a/b` and `/a`; the bucket is the last of an `s3://` URI."""
    scheme, separator, path = uri.rpartition("://")
    parts = path.split("/")
    return [scheme + separator + "/".join(parts[:end]) for end in range(len(parts) - 1, 0, -1) if parts[end - 1]]
