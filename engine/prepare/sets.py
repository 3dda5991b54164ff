"""One prompt set while it is made: rows from its sources, the checks in their order, counts."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from engine.errors import DataError
from engine.prepare.rendering import Renderer
from engine.prepare.sources import ROWS_PER_BATCH, read_file, source_files
from engine.prepare.writing import Quarantine, ShardWriter
from engine.rewards import gym
from engine.rows import BadRow, Candidate, check_row
from engine.spec import FileSource, GeneratedSource, PromptSetSpec
from engine.spec.prepare import set_responses

TRIES_PER_ROW = 20
"""Rows drawn from a generator for each one wanted, before it is said to have no more different ones."""
PROGRESS_BATCHES = 16

Unique = tuple[Candidate, bytes]
"""A row whose prompt is new to the set, and the prompt's digest."""


class PromptSetBuilder:
    """Reads the sources of one set into a writer; what is wrong goes to the quarantine."""

    def __init__(self, name: str, renderer: Renderer, writer: ShardWriter, quarantine: Quarantine,
                 held_out: set[bytes] | None = None):
        """Args: held_out: `asked` of the held-out sets, which this one may not ask; None: it is one of them."""
        self.name = name
        self._responses = set_responses(name)
        self.asked: set[bytes] = set()
        """Digests of what the set asks; empty when it has a `held_out`."""
        self.counts: Counter[str] = Counter()
        """`rows` = `good` + `bad` + `dropped`; `bad/KIND`; `cut`, `redrawn`; `tokens` of the good ones."""
        self._renderer, self._writer, self._quarantine, self._held_out = renderer, writer, quarantine, held_out
        self._seen: set[bytes] = set()
        self._batch: list[Unique | BadRow] = []

    def read(self, spec: PromptSetSpec, report: Callable[[int, int], None]) -> None:
        """Read all sources.

        Args:
            report: called from time to time with the rows read and the bad ones among them.
        Raises:
            DataError: a source is not there, cannot be read, or cannot make as many rows as it should.
            ModelError: chat messages, and a tokenizer without chat template.
        """
        batches = 0
        for item in self._items(spec):
            self._batch.append(item)
            if len(self._batch) == ROWS_PER_BATCH:
                self._flush()
                batches += 1
                if batches % PROGRESS_BATCHES == 0:
                    report(self.counts["rows"], self.counts["bad"])
        self._flush()

    def finish(self, max_bad_share: float) -> dict[str, Any]:
        """Close the files; the set's part of the manifest.

        Raises:
            DataError: too many bad rows, or none that is good.
        """
        counts, path = self.counts, self._quarantine.path
        share = counts["bad"] / max(1, counts["rows"])
        if share > max_bad_share:
            first = self._quarantine.first[self.name]
            raise DataError(
                f"{self.name}: {counts['bad']} of {counts['rows']} rows are bad ({share:.2%}), max_bad_share is "
                f"{max_bad_share:.2%}; all are in {path}, the first: {first.file}:{first.line}: {first.reason}")
        if not counts["good"]:
            raise DataError(f"{self.name}: no prompts left of {counts['rows']} rows; see {path}")
        files = self._writer.close()
        digest = hashlib.sha256("".join(f"{file['name']} {file['sha256']}\n" for file in files).encode()).hexdigest()
        return {"files": files, "rows": counts["good"], "sha256": digest, "counts": dict(sorted(counts.items()))}

    def _items(self, spec: PromptSetSpec) -> Iterator[Unique | BadRow]:
        for source in spec.sources:
            yield from self._draw(source) if isinstance(source, GeneratedSource) else self._read(source)

    def _read(self, source: FileSource) -> Iterator[Unique | BadRow]:
        for file in source_files(source):
            for row in read_file(file):
                candidate = row if isinstance(row, BadRow) else check_row(
                    row, source, self._renderer.chat, self._responses)
                yield candidate if isinstance(candidate, BadRow) else self._first_of_its_kind(candidate)

    def _first_of_its_kind(self, candidate: Candidate) -> Unique | BadRow:
        digest = candidate.digest()
        if digest in self._seen:
            return candidate.bad("duplicate", f"an earlier row has the same prompt (id {digest.hex()[:16]})")
        if not self._may_ask(candidate):
            return candidate.bad("overlap", f"the eval set has the same prompt (id {digest.hex()[:16]})")
        self._seen.add(digest)
        return candidate, digest

    def _may_ask(self, candidate: Candidate) -> bool:
        asked = candidate.asked_digest()
        if self._held_out is not None:
            return asked not in self._held_out
        self.asked.add(asked)
        return True

    def _draw(self, source: GeneratedSource) -> Iterator[Unique]:
        """Make rows until there are `size` different ones that are not held out."""
        file, made = f"{source.kind}:{source.task}", 0
        shown = {shot.question for shot in source.demonstrations}
        limit = source.size * TRIES_PER_ROW + 1000
        for number, entry in enumerate(gym.generate(source), start=1):
            candidate = self._as_candidate(source, entry, file, number)
            digest = candidate.digest()
            # Two templates may give one text.
            same = len(set(candidate.responses)) < len(candidate.responses)
            if same or digest in self._seen or entry["question"] in shown or not self._may_ask(candidate):
                self.counts["redrawn"] += 1
            else:
                self._seen.add(digest)
                made += 1
                yield candidate, digest
            if made == source.size:
                return
            if number == limit:
                raise DataError(
                    f"{self.name}: {file} made only {made} different prompts in {number} tries, size is {source.size}; "
                    f"lower size or widen config {source.config}")

    def _as_candidate(self, source: GeneratedSource, entry: dict[str, Any], file: str, number: int) -> Candidate:
        content: Any = source.prompt.replace("{question}", entry["question"])
        if self._renderer.chat or source.system is not None or source.demonstrations:
            system = [] if source.system is None else [{"role": "system", "content": source.system}]
            shown = [turn for shot in source.demonstrations for turn in (
                {"role": "user", "content": source.prompt.replace("{question}", shot.question)},
                {"role": "assistant", "content": shot.response})]
            content = [*system, *shown, {"role": "user", "content": content}]
        responses = tuple(
            getattr(source, name).replace("{question}", entry["question"]).replace("{answer}", str(entry["answer"]))
            for name in self._responses)
        return Candidate(file, number, content, str(entry["answer"]), source.task, gym.keep_entry(source, entry),
                         question=entry["question"], responses=responses)

    def _flush(self) -> None:
        """Tokenise what was collected and write it, good and bad rows in their order."""
        encoded = iter(self._renderer.encode([item[0] for item in self._batch if not isinstance(item, BadRow)]))
        for item in self._batch:
            self.counts["rows"] += 1
            outcome = item if isinstance(item, BadRow) else next(encoded)
            if isinstance(outcome, BadRow):
                self.counts["bad"] += 1
                self.counts[f"bad/{outcome.kind}"] += 1
                self._quarantine.add(self.name, outcome)
            elif outcome is None:
                self.counts["dropped"] += 1
            else:
                assert not isinstance(item, BadRow)
                self.counts["good"] += 1
                self.counts["tokens"] += len(outcome.ids) + sum(map(len, outcome.responses))
                self.counts["cut"] += outcome.cut
                self._writer.add(*item, outcome)
        self._batch.clear()
