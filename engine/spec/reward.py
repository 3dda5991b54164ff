"""How responses are scored: a union on `kind`; several rewards add up with weights."""

import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from engine.spec.base import URI, Count, Share, Spec


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return pattern


def _without_credentials(url: str) -> str:
    if "@" in urlsplit(url).netloc:
        raise ValueError("must hold no user and password, which specs, logs and MLflow would show; the judge's key "
                         "goes into the environment variable RATCHET_JUDGE_KEY")
    return url


Pattern = Annotated[str, Field(min_length=1), AfterValidator(_compiles)]
"""Regular expression the whole response must match; its first group (without one: all of it) is the answer."""

WHOLE_RESPONSE = r"(?s)\s*(.*?)\s*"
"""Matches everything; the answer is the response without surrounding white space."""


class RewardBase(Spec):
    """What all rewards share."""

    name: str | None = Field(None, pattern=r"^[a-z0-9_]+$")
    """In metrics; None: the kind, with a number behind it where it repeats."""
    weight: float = 1.0
    """Factor in the sum of rewards."""


class PooledReward(RewardBase):
    """What rewards have in common that processes beside the engine compute, one sample at a time."""

    timeout_s: float = Field(5.0, gt=0)
    """Seconds one sample may take."""
    on_error: float = 0.0
    """Score of a sample whose scoring raised or ran out of time; it is counted, it never ends the run."""


class AnswerReward(PooledReward):
    """A reward that takes an answer out of the response first. A response that `pattern` does not match scores 0."""

    pattern: Pattern = WHOLE_RESPONSE
    format_score: Share = 0.0
    """Score of a response that matches but is wrong."""


class ReasoningGymReward(AnswerReward):
    """reasoning-gym's own verifier of the row's task, from its metadata; partial credit above `format_score` stays."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"


class ExactMatchReward(AnswerReward):
    """1 when the answer equals the row's answer, white space around both aside."""

    kind: Literal["exact"] = "exact"


class NumericMatchReward(AnswerReward):
    """1 when the answer, read as a decimal number or fraction (`1,000.50`, `-3/4`, `12 %`), equals the row's."""

    kind: Literal["numeric"] = "numeric"
    tolerance: float = Field(0.0, ge=0)
    """Largest accepted difference as a share of the reference's magnitude (of 1 where that is smaller)."""


class MathVerifyReward(AnswerReward):
    """1 when math-verify finds the answer equivalent to the row's (LaTeX or expressions)."""

    kind: Literal["math_verify"] = "math_verify"


class RegexReward(PooledReward):
    """1 when the whole response matches."""

    kind: Literal["regex"] = "regex"
    pattern: Pattern


class JsonSchemaReward(PooledReward):
    """1 when the response is JSON that the schema accepts, `parse_score` when it is JSON but not accepted, else 0."""

    kind: Literal["json_schema"] = "json_schema"
    json_schema: dict[str, Any]
    """Draft 2020-12; remote references are not followed."""
    parse_score: Share = 0.0


class LengthReward(PooledReward):
    """Minus the share of the allowed length that the response used."""

    kind: Literal["length"] = "length"


class CodeReward(PooledReward):
    """Share of the row's unit tests that the code in the response passes, in a sandboxed process.

    The row's metadata has `tests`: a list of Python texts, each run after the response's code in a fresh interpreter.
    """

    kind: Literal["code"] = "code"
    pattern: Pattern = r"(?s).*?```(?:python)?\n(.*?)```.*"
    timeout_s: float = Field(20.0, gt=0)
    test_timeout_s: float = Field(4.0, gt=0)
    """CPU and wall seconds of one test."""
    memory_bytes: Annotated[int, Field(ge=64 << 20)] = 256 << 20
    """Address space of the sandbox."""
    all_or_nothing: bool = False
    """1 when all tests pass and else 0, instead of the share."""


class JudgeReward(PooledReward):
    """A remote model's grade, over the OpenAI-compatible chat API, divided by `scale`.

    The key comes from the environment variable RATCHET_JUDGE_KEY, if there is one.
    """

    kind: Literal["judge"] = "judge"
    url: Annotated[str, Field(pattern=r"^https?://"), AfterValidator(_without_credentials)]
    """Base address, for example `http://host:8000/v1`."""
    model: str
    prompt: str = ("Grade the answer from 0 (useless) to 10 (perfect). Reply with the number alone.\n\n"
                   "Question:\n{prompt}\n\nReference:\n{answer}\n\nAnswer:\n{response}")
    """Template of the user message; `{prompt}`, `{answer}` and `{response}` are filled in."""
    grade_pattern: Pattern = r"(?s).*?(-?\d+(?:\.\d+)?).*"
    """Its first group is the grade."""
    scale: float = Field(10.0, gt=0)
    """Best grade."""
    timeout_s: float = Field(60.0, gt=0)
    """Of one sample, the rate limit's waiting and retries included."""
    max_retries: int = Field(4, ge=0)
    max_concurrent: Count = 16
    max_requests_per_s: float = Field(20.0, gt=0)


class RewardModelReward(RewardBase):
    """A trained reward model's score of prompt and response, read at the last token; on the job's own ranks.

    It reads the sampled tokens, so its tokenizer must be the policy's. A score that is not finite is counted as an
    error and stays: the iteration is skipped by it.
    """

    kind: Literal["reward_model"] = "reward_model"
    model: URI
    """What a finetune job of kind `reward_model` exported; a path that all ranks share."""


Reward = Annotated[
    ReasoningGymReward | ExactMatchReward | NumericMatchReward | MathVerifyReward | RegexReward | JsonSchemaReward
    | LengthReward | CodeReward | JudgeReward | RewardModelReward,
    Field(discriminator="kind"),
]


def reward_names(rewards: list[RewardBase]) -> list[str]:
    """The name of each reward in metrics: given, or its kind, numbered where it repeats. All differ.

    Raises:
        ValueError: two rewards were given the same name.
    """
    names: list[str] = []
    for reward in rewards:
        stem = reward.name or reward.kind  # type: ignore[attr-defined]
        if reward.name in names:
            raise ValueError(f"rewards: the name {reward.name!r} is given twice")
        number = 1
        while (name := stem if number == 1 else f"{stem}_{number}") in names:
            number += 1
        names.append(name)
    return names
