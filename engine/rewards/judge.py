"""A remote model as a judge, over the OpenAI-compatible chat API: concurrent, rate-limited, retried, cached."""

import hashlib
import json
import os
import random
import re
import threading
import time
import urllib.error
import urllib.request
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from engine.rewards.outcome import Case, Outcome
from engine.spec.reward import JudgeReward

CACHE_ENTRIES = 100_000
MAX_ANSWER_BYTES = 1 << 20
FIRST_WAIT_S = 0.5
"""Before the first retry, doubled for each further one, times a random factor in [0.5, 1.5)."""
RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
KEY_VARIABLE = "RATCHET_JUDGE_KEY"

Grade = tuple[Outcome, float, str]
"""Outcome, score, message."""


class _TryAgain(Exception):
    """A failure that may pass, and how long the server asks to wait."""

    def __init__(self, reason: str, wait_s: float = 0.0):
        super().__init__(reason)
        self.wait_s = wait_s


class Judge:
    """Grades cases by asking the server of a `JudgeReward`; equal questions are asked once."""

    def __init__(self, reward: JudgeReward):
        """Nothing is sent yet."""
        self._reward = reward
        self._pattern = re.compile(reward.grade_pattern)
        self._cache: OrderedDict[str, Grade] = OrderedDict()
        self._turn = threading.Lock()
        self._next_turn = 0.0

    def grade(self, cases: Sequence[Case]) -> list[Grade]:
        """Grade cases, at most `max_concurrent` at a time; in their order. Failures are outcomes, never raised."""
        questions = [self._question(case) for case in cases]
        keys = [hashlib.sha256(question.encode(errors="replace")).hexdigest() for question in questions]
        new = {key: question for key, question in zip(keys, questions, strict=True) if key not in self._cache}
        with ThreadPoolExecutor(self._reward.max_concurrent, thread_name_prefix="judge") as threads:
            grades = dict(zip(new, threads.map(self._ask, new.values()), strict=True))
        # Taken before old entries go: they may be among this call's.
        answers = [grades.get(key) or self._cache[key] for key in keys]
        self._cache.update((key, grade) for key, grade in grades.items() if grade[0] is Outcome.SCORED)
        while len(self._cache) > CACHE_ENTRIES:
            self._cache.popitem(last=False)
        return answers

    def _question(self, case: Case) -> str:
        # In one pass: a response that says `{answer}` does not get the reference filled in.
        parts = {"{prompt}": case.prompt, "{answer}": case.answer, "{response}": case.response}
        return re.sub(r"\{(prompt|answer|response)\}", lambda match: parts[match[0]], self._reward.prompt)

    def _ask(self, question: str) -> Grade:
        deadline = time.monotonic() + self._reward.timeout_s
        wait_s, attempt = FIRST_WAIT_S, 0
        while True:
            try:
                self._wait_for_turn(deadline)
                return self._read_grade(self._post(question, deadline))
            except TimeoutError:
                return Outcome.TIMEOUT, 0.0, f"no grade from {self._reward.url} within {self._reward.timeout_s:g} s"
            except _TryAgain as failure:
                attempt += 1
                if attempt > self._reward.max_retries:
                    return Outcome.ERROR, 0.0, f"{self._reward.url}: {failure}, {attempt} times"
                pause = max(failure.wait_s, wait_s * (0.5 + random.random()))
                wait_s *= 2
            except (urllib.error.HTTPError, ValueError) as error:
                return Outcome.ERROR, 0.0, f"{self._reward.url}: {' '.join(str(error).split())[:200]}"
            if time.monotonic() + pause >= deadline:
                return Outcome.TIMEOUT, 0.0, f"no grade from {self._reward.url} within {self._reward.timeout_s:g} s"
            time.sleep(pause)

    def _wait_for_turn(self, deadline: float) -> None:
        """Requests leave at `max_requests_per_s`, evenly.

        Raises:
            TimeoutError: the turn would come after the deadline.
        """
        with self._turn:
            turn = max(time.monotonic(), self._next_turn)
            if turn >= deadline:
                raise TimeoutError
            self._next_turn = turn + 1 / self._reward.max_requests_per_s
        time.sleep(max(0.0, turn - time.monotonic()))

    def _post(self, question: str, deadline: float) -> str:
        body = {"model": self._reward.model, "temperature": 0, "messages": [{"role": "user", "content": question}]}
        # The spec admits http and https only.
        request = urllib.request.Request(  # noqa: S310
            self._reward.url.rstrip("/") + "/chat/completions", data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"})
        if key := os.environ.get(KEY_VARIABLE):
            # Not sent on to wherever the server redirects.
            request.add_unredirected_header("Authorization", f"Bearer {key}")
        try:
            with urllib.request.urlopen(request, timeout=max(0.01, deadline - time.monotonic())) as answer:  # noqa: S310
                return _read(answer, deadline)
        except urllib.error.HTTPError as error:
            with error:
                if error.code in RETRIED:
                    raise _TryAgain(f"HTTP {error.code}", _seconds(error.headers.get("Retry-After"))) from None
                raise
        except TimeoutError:
            raise
        except OSError as error:
            # URLError wraps the time-out of a connection.
            if isinstance(getattr(error, "reason", None), TimeoutError):
                raise TimeoutError from None
            raise _TryAgain(f"{type(error).__name__}: {getattr(error, 'reason', error)}") from None

    def _read_grade(self, answer: str) -> Grade:
        try:
            text = json.loads(answer)["choices"][0]["message"]["content"]
            match = self._pattern.fullmatch(text)
        except (KeyError, IndexError, TypeError):
            raise ValueError("its reply has no choices[0].message.content") from None
        if match is None:
            raise ValueError(f"no grade in its reply {text[:80]!r}")
        grade = float(match[1]) / self._reward.scale
        if not 0 <= grade <= 1:
            raise ValueError(f"its grade {match[1]} is not in [0, {self._reward.scale:g}]")
        return Outcome.SCORED, grade, ""


def _read(answer, deadline: float) -> str:
    """The body; a server that drips it out is not waited for beyond the deadline.

    Raises:
        TimeoutError: the deadline has passed. ValueError: it is too large.
    """
    content = b""
    while data := answer.read1(1 << 16):
        content += data
        if time.monotonic() >= deadline:
            raise TimeoutError
        if len(content) > MAX_ANSWER_BYTES:
            raise ValueError(f"its reply is longer than {MAX_ANSWER_BYTES} bytes")
    return content.decode(errors="replace")


def _seconds(header: str | None) -> float:
    try:
        return max(0.0, float(header or 0))
    except ValueError:
        return 0.0  # a date: the usual waiting time will do
