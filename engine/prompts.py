"""Prepared prompts: the rows of a prompt set, and the cursor that deals them out reproducibly. Torch-free.

Demonstrations and preference pairs are prompts with responses.
"""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from engine import store
from engine.errors import DataError

SCHEMA = pa.schema([
    ("id", pa.string()),
    ("task", pa.string()),
    ("text", pa.string()),
    ("messages", pa.string()),
    ("answer", pa.string()),
    ("metadata", pa.string()),
    ("token_ids", pa.list_(pa.int32())),
    ("responses", pa.list_(pa.list_(pa.int32()))),
])
"""Columns of a shard; `messages` and `metadata` are JSON texts, `messages` null for a prompt without chat template;
`responses` holds the demonstrated one, or the chosen and the rejected one, each with its end token; null without."""


@dataclass(frozen=True)
class Prompt:
    """One row of a prepared set."""

    id: str
    """16 hexadecimal digits of the digest of prompt and responses: the same row has the same id in every set."""
    token_ids: tuple[int, ...]
    """What the model is given: rendered with the chat template and tokenised once, by the prepare stage."""
    text: str
    """What a person reads: the last message, or the raw prompt."""
    answer: str = ""
    """Reference answer; empty when there is none."""
    task: str = ""
    """Name for breakdowns."""
    messages: tuple[dict[str, str], ...] | None = None
    """Chat messages before rendering; None for a raw prompt."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """All other columns of the source row; what verifiers need (`reasoning_gym`: task, config, entry)."""
    responses: tuple[tuple[int, ...], ...] = ()
    """Tokens of the demonstrated response, or of the chosen and the rejected one; each ends with the end token."""


class PromptSet:
    """The prompts of one split of a prepared directory, in file order. Rows stay in Arrow until asked for."""

    def __init__(self, table: pa.Table, sha256: str):
        """Args: table: of SCHEMA, at least one row; sha256: of the set, from its manifest."""
        self._table = table.combine_chunks()
        self.sha256 = sha256

    @classmethod
    def open(cls, uri: str, split: str) -> "PromptSet":
        """Read a split of the prepare stage's output and check it against the manifest.

        Args:
            uri: output of the prepare stage, a path or `s3://`.
            split: `train` or `eval`.
        Raises:
            DataError: no such split, or other bytes than the manifest says. StoreError: the store does not answer.
        """
        manifest = json.loads(store.read_text(store.join(uri, store.MANIFEST)))
        if split not in manifest.get("sets", {}):
            raise DataError(f"prompts {uri}: no split {split!r}; it has {sorted(manifest.get('sets', {}))}")
        entry = manifest["sets"][split]
        tables = []
        for shard in entry["files"]:
            content = store.read_bytes(store.join(uri, shard["name"]))
            if store.sha256_bytes(content) != shard["sha256"]:
                raise DataError(f"prompts {uri}/{shard['name']}: not the bytes of its manifest; prepare them again")
            tables.append(pq.read_table(io.BytesIO(content), schema=SCHEMA))
        return cls(pa.concat_tables(tables), entry["sha256"])

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, row: int) -> Prompt:
        if not 0 <= row < len(self):
            raise IndexError(f"prompt {row} of a set of {len(self)}")
        return _as_prompt(self._table.slice(row, 1).to_pylist()[0])

    def __iter__(self) -> Iterator[Prompt]:
        return (self[row] for row in range(len(self)))

    @cached_property
    def max_prompt_tokens(self) -> int:
        """Tokens of the longest prompt."""
        return pc.max(pc.list_value_length(self._table["token_ids"])).as_py()


def _as_prompt(row: dict[str, Any]) -> Prompt:
    messages = row["messages"]
    return Prompt(
        id=row["id"], token_ids=tuple(row["token_ids"]), text=row["text"], answer=row["answer"], task=row["task"],
        messages=None if messages is None else tuple(json.loads(messages)), metadata=json.loads(row["metadata"]),
        responses=tuple(tuple(ids) for ids in row["responses"] or ()))


class PromptCursor:
    """Where a run stands in its prompt set: shuffled anew each epoch, an iteration may cross from one into the next.

    The order of an epoch depends on (seed, epoch) alone, so (seed, epoch, position) is the whole state: a run that is
    killed any number of times sees the same prompts as one that never was.
    """

    def __init__(self, prompts: PromptSet, seed: int, epoch: int = 0, position: int = 0):
        """Args: seed: of the shuffles; epoch: from 0; position: prompts of the epoch already taken."""
        self.prompts, self.seed, self.epoch, self.position = prompts, seed, epoch, position
        self._cached: tuple[int, np.ndarray] | None = None

    @classmethod
    def restore(cls, prompts: PromptSet, state: dict[str, Any]) -> "PromptCursor":
        """The cursor that `state()` described.

        Raises:
            DataError: the state belongs to another prompt set.
        """
        if state["prompts_sha256"] != prompts.sha256:
            raise DataError(
                f"checkpoint: its data cursor is of prompt set {state['prompts_sha256'][:12]}, the job's prompts are "
                f"{prompts.sha256[:12]}; resume with the prompts it was trained on")
        return cls(prompts, state["seed"], state["epoch"], state["position"])

    def state(self) -> dict[str, Any]:
        """Plain JSON for a checkpoint."""
        return {"seed": self.seed, "epoch": self.epoch, "position": self.position,
                "prompts_sha256": self.prompts.sha256}

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts; advances the cursor."""
        rows: list[int] = []
        while len(rows) < count:
            if self.position == len(self.prompts):
                self.epoch, self.position = self.epoch + 1, 0
            order = self._order(self.epoch)
            taken = order[self.position : self.position + count - len(rows)].tolist()
            rows += taken
            self.position += len(taken)
        return [self.prompts[row] for row in rows]

    def _order(self, epoch: int) -> np.ndarray:
        if self._cached is None or self._cached[0] != epoch:
            self._cached = (epoch, epoch_order(len(self.prompts), self.seed, epoch))
        return self._cached[1]


def epoch_order(size: int, seed: int, epoch: int) -> np.ndarray:
    """[size] int64: the permutation of one epoch.

    Drawn from the raw bits of PCG64, whose stream NumPy guarantees for all versions (that of `shuffle` it does not).
    """
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(size)
    return np.argsort(bits, kind="stable")
