"""The process pool that scores responses: a time limit per sample, and nothing a verifier does can end the run."""

import math
import os
import selectors
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

from engine.errors import FaultError
from engine.prompts import Prompt
from engine.rewards.judge import Judge
from engine.rewards.outcome import Case, Outcome
from engine.rewards.workers import ForkServer, Result, Unit, Worker
from engine.spec.reward import JudgeReward, PooledReward, RewardBase, reward_names

MAX_CHUNK = 32
"""Verifier calls sent to a worker at once: bounds what is sent again when it is killed."""
CHUNKS_PER_WORKER = 4
START_LIMIT_S = 180.0
"""Seconds the verifiers' imports may take."""
MAX_MESSAGES = 5


@dataclass(frozen=True)
class Scorable:
    """One response to score."""

    response_text: str
    """Detokenised, without end tokens."""
    prompt: Prompt
    num_response_tokens: int
    max_response_tokens: int
    truncated: bool
    """Stopped by the length limit."""


@dataclass(frozen=True)
class Scores:
    """What the rewards say of N responses, in the order they were given."""

    total: list[float]
    """[N] weighted sum of the rewards."""
    by_name: dict[str, list[float]]
    """[N] each reward before its weight; `on_error` where scoring failed."""
    outcomes: dict[str, list[Outcome]]
    """[N] how the scoring by each reward went."""
    messages: list[str]
    """The first few errors, one line each."""

    @cached_property
    def errors(self) -> list[bool]:
        """[N] some reward raised, crashed, or returned no finite number."""
        return self._any(Outcome.ERROR)

    @cached_property
    def timeouts(self) -> list[bool]:
        """[N] some reward ran out of time."""
        return self._any(Outcome.TIMEOUT)

    @cached_property
    def format_errors(self) -> list[bool]:
        """[N] some reward's pattern or schema did not match."""
        return self._any(Outcome.FORMAT_ERROR)

    def plus(self, name: str, reward: RewardBase, column: Sequence[float]) -> "Scores":
        """The same with one more reward, whose scores [N] are given; one that is not finite is an error and stays."""
        outcomes = [Outcome.SCORED if math.isfinite(score) else Outcome.ERROR for score in column]
        bad = [row for row, outcome in enumerate(outcomes) if outcome is Outcome.ERROR]
        return Scores(
            [total + reward.weight * score for total, score in zip(self.total, column, strict=True)],
            self.by_name | {name: list(column)}, self.outcomes | {name: outcomes},
            self.messages + [f"reward {name}, row {row}: its score is {column[row]}" for row in bad[:MAX_MESSAGES]])

    def _any(self, outcome: Outcome) -> list[bool]:
        return [any(column[row] is outcome for column in self.outcomes.values()) for row in range(len(self.total))]


class ScoringPool:
    """Worker processes, started once, that score by a list of rewards. Use as a context manager or call `close`."""

    def __init__(self, rewards: Sequence[PooledReward], num_workers: int | None = None):
        """Starts the workers and returns at once; the first `score` waits for them.

        Args:
            rewards: at least one.
            num_workers: processes; None: one a CPU core.
        """
        self.rewards = list(rewards)
        self.names = reward_names(self.rewards)
        # Judges wait for a network and need no process of their own.
        self._judges = {index: Judge(reward) for index, reward in enumerate(self.rewards)
                        if isinstance(reward, JudgeReward)}
        self._selector = selectors.DefaultSelector()
        self._server = ForkServer(self.rewards)
        for _ in range(num_workers or os.cpu_count() or 1):
            self._start_worker()

    def __enter__(self) -> "ScoringPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers():
            worker.connection.close()
        self._selector.close()
        self._server.close()

    def score(self, items: Sequence[Scorable]) -> Scores:
        """Score responses by every reward; results in the order of `items`. Callable from any one thread at a time.

        Raises:
            FaultError: the scoring processes cannot be started.
        """
        run = _Run(self.rewards, items, self._chunk_size(len(items)))
        with ThreadPoolExecutor(max(1, len(self._judges)), thread_name_prefix="judges") as threads:
            cases = [_as_case(item) for item in items] if self._judges else []
            grades = {index: threads.submit(judge.grade, cases) for index, judge in self._judges.items()}
            while run.missing:
                self._feed(run)
                for key, _ in self._selector.select(self._patience()):
                    self._collect(run, key.data)
                self._end_overdue(run)
            for index, future in grades.items():
                for row, grade in enumerate(future.result()):
                    run.record((row, index, *grade))
        return run.scores(self.names)

    def _chunk_size(self, num_items: int) -> int:
        units = num_items * len(self.rewards)
        return max(1, min(MAX_CHUNK, units // (len(self._workers()) * CHUNKS_PER_WORKER)))

    def _workers(self) -> list[Worker]:
        return [key.data for key in self._selector.get_map().values()]

    def _start_worker(self) -> None:
        worker = self._server.start_worker()
        self._selector.register(worker.connection, selectors.EVENT_READ, worker)

    def _replace(self, worker: Worker) -> None:
        self._selector.unregister(worker.connection)
        worker.end()
        if not worker.pid:
            raise FaultError(
                "rewards: a scoring process was not ready for work before it died or its start limit passed; "
                "its traceback is in the log")
        if not self._server.alive:
            # Killed from outside; each of its workers comes here in turn.
            self._server.close()
            self._server = ForkServer(self.rewards)
        self._start_worker()

    def _feed(self, run: "_Run") -> None:
        for worker in self._workers():
            if worker.idle and (units := run.next_chunk()):
                try:
                    worker.give(units, run.cases_of(units))
                except OSError:
                    # It died idle: no verifier call is to blame.
                    run.take_back(worker)
                    self._replace(worker)

    def _collect(self, run: "_Run", worker: Worker) -> None:
        results, alive = worker.read()
        for result in results:
            run.record(result)
        if not alive:
            self._drop(run, worker, Outcome.ERROR, "the scoring process died")

    def _end_overdue(self, run: "_Run") -> None:
        for worker in self._workers():
            if time.monotonic() < self._deadline(worker):
                continue
            # This process may have been the slow one: take what has arrived before judging.
            self._collect(run, worker)
            if time.monotonic() >= self._deadline(worker):
                limit = f"killed at its limit of {self._deadline(worker) - worker.since:g} s"
                self._drop(run, worker, Outcome.TIMEOUT, limit)

    def _drop(self, run: "_Run", worker: Worker, outcome: Outcome, message: str) -> None:
        """Charge the call a worker was busy with, give the rest of its chunk to others, and replace it.

        A worker that died before it began (killed while idle) is charged to nobody, but to no call twice.
        """
        if worker.units:
            unit = worker.units[0]
            if worker.begun or outcome is Outcome.TIMEOUT or unit in run.forgiven:
                run.record((*worker.units.popleft(), outcome, 0.0, message))
            run.forgiven.add(unit)
            run.take_back(worker)
        self._replace(worker)

    def _deadline(self, worker: Worker) -> float:
        if not worker.pid:
            return worker.since + START_LIMIT_S
        return worker.since + self.rewards[worker.units[0][1]].timeout_s if worker.units else float("inf")

    def _patience(self) -> float:
        return max(0.0, min(map(self._deadline, self._workers())) - time.monotonic())


class _Run:
    """The state of one `score` call: what is to be done, and what came back."""

    def __init__(self, rewards: list[PooledReward], items: Sequence[Scorable], chunk_size: int):
        self._rewards, self._items, self._chunk_size = rewards, items, chunk_size
        local = [index for index, reward in enumerate(rewards) if not isinstance(reward, JudgeReward)]
        self._todo: deque[Unit] = deque((row, index) for row in range(len(items)) for index in local)
        self._scores = [[0.0] * len(items) for _ in rewards]
        self._outcomes = [[Outcome.ERROR] * len(items) for _ in rewards]
        self._messages: list[str] = []
        self.missing = len(self._todo)
        """Verifier calls that have not been answered."""
        self.forgiven: set[Unit] = set()
        """Calls that were first in the chunk of a worker that died."""

    def next_chunk(self) -> list[Unit]:
        return [self._todo.popleft() for _ in range(min(self._chunk_size, len(self._todo)))]

    def take_back(self, worker: Worker) -> None:
        while worker.units:
            self._todo.appendleft(worker.units.pop())

    def cases_of(self, units: Sequence[Unit]) -> dict[int, Case]:
        return {row: _as_case(self._items[row]) for row, _ in units}

    def record(self, result: Result) -> None:
        row, reward, outcome, score, message = result
        failed = outcome in (Outcome.ERROR, Outcome.TIMEOUT)
        self._scores[reward][row] = self._rewards[reward].on_error if failed else score
        self._outcomes[reward][row] = outcome
        if failed and len(self._messages) < MAX_MESSAGES:
            prompt = self._items[row].prompt.id
            self._messages.append(f"reward {self._rewards[reward].kind}, row {row}, prompt {prompt}: {message}")
        self.missing -= 1

    def scores(self, names: list[str]) -> Scores:
        weights = [reward.weight for reward in self._rewards]
        total = [sum(w * column[row] for w, column in zip(weights, self._scores, strict=True))
                 for row in range(len(self._items))]
        return Scores(total, dict(zip(names, self._scores, strict=True)),
                      dict(zip(names, self._outcomes, strict=True)), self._messages)


def _as_case(item: Scorable) -> Case:
    prompt = item.prompt
    return Case(item.response_text, prompt.text, prompt.answer, prompt.metadata, item.num_response_tokens,
                item.max_response_tokens)
