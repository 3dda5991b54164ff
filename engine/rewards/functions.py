"""The scoring function of each reward kind. Heavy verifiers are imported when their function is built."""

import json
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from fractions import Fraction

from engine.rewards.outcome import Case, Verdict
from engine.spec.reward import (
    AnswerReward,
    CodeReward,
    ExactMatchReward,
    JsonSchemaReward,
    LengthReward,
    MathVerifyReward,
    NumericMatchReward,
    PooledReward,
    ReasoningGymReward,
    RegexReward,
)

RewardFunction = Callable[[Case], Verdict]
ANSWER_FORMAT_ERROR = Verdict(0.0, format_error=True)
NUMBER = re.compile(r"([+-]?)\s*\$?(\d[\d,_]*\.?\d*|\.\d+)(?:\s*/\s*(\d[\d,_]*\.?\d*))?\s*(%?)\.?", re.ASCII)


def reward_function(reward: PooledReward) -> RewardFunction:
    """The function that scores one case by `reward`."""
    return _BUILDERS[type(reward)](reward)


def extract_answer(pattern: re.Pattern[str], response: str) -> str | None:
    """The answer in a response that matches `pattern` as a whole, else None."""
    match = pattern.fullmatch(response)
    if match is None:
        return None
    return (match[1] if pattern.groups else match[0]) or ""


def parse_number(text: str) -> Fraction | None:
    """Read `1,000.50`, `-3/4`, `$5`, `12 %` (0.12) exactly; None when `text` is anything else."""
    match = NUMBER.fullmatch(text.strip())
    if match is None:
        return None
    sign, numerator, denominator, percent = match.groups()
    try:
        value = Fraction(Decimal(_digits(numerator))) / (Fraction(Decimal(_digits(denominator))) if denominator else 1)
    except (InvalidOperation, ZeroDivisionError):
        return None
    return (-value if sign == "-" else value) / (100 if percent else 1)


def _digits(text: str) -> str:
    return text.replace(",", "").replace("_", "")


def _answer_function(reward: AnswerReward, compare: Callable[[str, Case], float]) -> RewardFunction:
    """`compare(answer, case)` in [0, 1] for what `pattern` takes from the response."""
    pattern = re.compile(reward.pattern)

    def score(case: Case) -> Verdict:
        answer = extract_answer(pattern, case.response)
        if answer is None:
            return ANSWER_FORMAT_ERROR
        return Verdict(max(compare(answer, case), reward.format_score))

    return score


def _exact(reward: ExactMatchReward) -> RewardFunction:
    return _answer_function(reward, lambda answer, case: float(answer.strip() == case.answer.strip()))


def _numeric(reward: NumericMatchReward) -> RewardFunction:
    tolerance = Fraction(reward.tolerance)

    def compare(answer: str, case: Case) -> float:
        reference = parse_number(case.answer)
        if reference is None:
            raise ValueError(f"the reference answer {case.answer[:40]!r} is no number")
        value = parse_number(answer)
        return float(value is not None and abs(value - reference) <= tolerance * max(abs(reference), 1))

    return _answer_function(reward, compare)


def _math_verify(reward: MathVerifyReward) -> RewardFunction:
    import logging

    import math_verify

    # It warns at every call that no time limit of its own is set; the pool kills, and counts what it killed, whereas
    # math-verify's alarm turns a time-out into a plain "not equal".
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def in_text(text: str) -> list:
        """What it finds between words: the last delimited formula, box or number."""
        return math_verify.parse(text, parsing_timeout=None)

    def as_formula(text: str) -> list:
        """The whole text as one formula; empty when it has delimiters of its own."""
        if not text.strip() or any(mark in text for mark in ("$", r"\boxed", r"\(", r"\[")):
            return []
        return math_verify.parse(f"${text}$", parsing_timeout=None)

    def compare(answer: str, case: Case) -> float:
        reference = as_formula(case.answer) or in_text(case.answer)
        if not reference:
            raise ValueError(f"math-verify cannot read the reference answer {case.answer[:40]!r}")
        # A response that it cannot parse is wrong, not an error.
        readings = in_text(answer) + as_formula(answer)
        return float(math_verify.verify(reference, readings, timeout_seconds=None, raise_on_error=True))

    return _answer_function(reward, compare)


def _reasoning_gym(reward: ReasoningGymReward) -> RewardFunction:
    # Seconds of imports: in the fork server, once, not within a sample's time limit.
    import reasoning_gym  # noqa: F401

    from engine.rewards.gym import verify

    return _answer_function(reward, lambda answer, case: verify(answer, case.metadata))


def _regex(reward: RegexReward) -> RewardFunction:
    pattern = re.compile(reward.pattern)
    return lambda case: Verdict(1.0) if pattern.fullmatch(case.response) else ANSWER_FORMAT_ERROR


def _json_schema(reward: JsonSchemaReward) -> RewardFunction:
    import jsonschema
    import referencing

    # An empty registry: a `$ref` to an address is an error, never a download.
    validator = jsonschema.Draft202012Validator(reward.json_schema, registry=referencing.Registry())

    def score(case: Case) -> Verdict:
        try:
            value = json.loads(case.response)
        except (ValueError, RecursionError):
            return ANSWER_FORMAT_ERROR
        if validator.is_valid(value):
            return Verdict(1.0)
        return Verdict(reward.parse_score, format_error=True)

    return score


def _length(reward: LengthReward) -> RewardFunction:
    return lambda case: Verdict(-case.num_response_tokens / case.max_response_tokens)


def _code(reward: CodeReward) -> RewardFunction:
    from engine.rewards.sandbox import code_function

    return code_function(reward)


_BUILDERS: dict[type, Callable] = {
    CodeReward: _code, ExactMatchReward: _exact, JsonSchemaReward: _json_schema, LengthReward: _length,
    MathVerifyReward: _math_verify, NumericMatchReward: _numeric, ReasoningGymReward: _reasoning_gym,
    RegexReward: _regex,
}
