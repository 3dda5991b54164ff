import json
from decimal import Decimal
from fractions import Fraction
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.rewards import gym
from engine.rewards.functions import parse_number
from engine.rewards.outcome import Verdict
from engine.spec import GeneratedSource
from engine.spec.reward import (
    ExactMatchReward,
    JsonSchemaReward,
    LengthReward,
    MathVerifyReward,
    NumericMatchReward,
    ReasoningGymReward,
    RegexReward,
    reward_names,
)
from tests.engine.rewards.scoring import verdict

STRICT = r"<answer>(-?\d+)</answer>"
WRONG_FORM = Verdict(0.0, format_error=True)


@pytest.mark.parametrize(("response", "expected"), [
    ("<answer>12</answer>", Verdict(1.0)),
    ("<answer>13</answer>", Verdict(0.25)),
    (" <answer>12</answer>", WRONG_FORM),
    ("<answer>12</answer>\n", WRONG_FORM),
    ("<answer>12</answer><answer>12</answer>", WRONG_FORM),
    ("<answer>12 </answer>", WRONG_FORM),
    ("12", WRONG_FORM),
    ("", WRONG_FORM),
])
@pytest.mark.parametrize("kind", [ExactMatchReward, NumericMatchReward])
def test_the_whole_response_must_match_the_pattern(kind, response, expected):
    assert verdict(kind(pattern=STRICT, format_score=0.25), response, "12") == expected


def test_without_pattern_the_whole_response_is_the_answer():
    assert verdict(ExactMatchReward(), " a\nb \n", "a\nb") == Verdict(1.0)
    assert verdict(ExactMatchReward(), "the answer is a", "a") == Verdict(0.0)
    assert verdict(ExactMatchReward(pattern=r"\d+"), "12", "12") == Verdict(1.0)


@pytest.mark.parametrize(("text", "value"), [
    ("1,000.50", Fraction("1000.5")), ("-3/4", Fraction(-3, 4)), ("$5", 5), ("12 %", Fraction(12, 100)),
    ("+.5", Fraction(1, 2)), ("007", 7), ("3.", 3), ("-$1,000", -1000), (" 4\n", 4), ("1/0", None), ("", None),
    ("one", None), ("1e5", None), ("1 2", None), ("--1", None), ("1/2/3", None), ("x1", None), ("٣", None),
    ("1.2.3", None), (",", None),
])
def test_numbers_are_read_exactly_or_not_at_all(text, value):
    assert parse_number(text) == value


@settings(deadline=None)
@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-10**12, max_value=10**12, places=6))
def test_a_written_decimal_is_read_back_with_and_without_separators(number):
    assert parse_number(f"{number:f}") == parse_number(f"{number:,f}") == Fraction(Decimal(number))


@settings(deadline=None)
@given(st.text(max_size=12) | st.text("0123456789.,/-+%$ ", max_size=12))
def test_reading_a_number_never_raises(text):
    parse_number(text)


def test_numeric_tolerance_is_relative_to_the_reference():
    reward = NumericMatchReward(tolerance=0.01)
    assert [verdict(reward, answer, "200").score for answer in ("202", "202.01", "198", "197.9")] == [1, 0, 1, 0]
    assert [verdict(reward, answer, "0").score for answer in ("0.01", "-0.01", "0.011")] == [1, 1, 0]
    assert verdict(NumericMatchReward(), "1/3", "0.3333333333").score == 0


@pytest.mark.parametrize(("response", "answer", "score"), [
    (r"$\frac{1}{2}$", "0.5", 1), (r"\frac{1}{2}", r"\frac{2}{4}", 1), ("x^2 + 2x + 1", "(x+1)^2", 1),
    (r"The answer is \boxed{12}", "12", 1), ("12", "13", 0), ("no idea", "13", 0), ("", "13", 0),
])
def test_math_verify_finds_equal_expressions(response, answer, score):
    assert verdict(MathVerifyReward(), response, answer).score == score


@pytest.mark.parametrize(("kind", "answer"), [(NumericMatchReward, "twelve"), (MathVerifyReward, "")])
def test_a_reference_that_cannot_be_read_is_an_error_and_not_a_wrong_answer(kind, answer):
    with pytest.raises(ValueError, match="reference answer"):
        verdict(kind(), "12", answer)


def test_regex_and_length():
    assert verdict(RegexReward(pattern="a+"), "aa") == Verdict(1.0)
    assert verdict(RegexReward(pattern="a+"), "aab") == WRONG_FORM
    assert verdict(LengthReward(), "anything") == Verdict(-0.1)


@pytest.mark.parametrize(("response", "expected"), [
    ('{"n": 3}', Verdict(1.0)), ('{"n": "3"}', Verdict(0.5, True)), ("{n: 3}", WRONG_FORM), ("[" * 100_000, WRONG_FORM),
])
def test_json_must_parse_and_fit_the_schema(response, expected):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    assert verdict(JsonSchemaReward(json_schema=schema, parse_score=0.5), response) == expected


def test_a_schema_never_fetches_a_remote_reference():
    reward = JsonSchemaReward(json_schema={"$ref": "http://127.0.0.1:1/schema.json"})
    with pytest.raises(Exception, match="Unresolvable"):
        verdict(reward, "{}")


def gym_metadata(task: str, index: int = 0, **config):
    source = GeneratedSource(task=task, size=5, config=config)
    entry = next(islice(gym.generate(source), index, None))
    return entry, gym.keep_entry(source, entry)


@pytest.mark.parametrize(
    "task", ["chain_sum", "countdown", "rearc", "path_star", "gsm_symbolic", "mini_sudoku", "zebra_puzzles"])
def test_gym_rows_are_verified_from_their_json_alone(task):
    entry, metadata = gym_metadata(task)
    metadata = json.loads(json.dumps(metadata))
    strict = ReasoningGymReward(pattern=r"(?s)Answer: (.*)", format_score=0.1)
    assert verdict(strict, f"Answer: {entry['answer']}", **metadata) == Verdict(1.0)
    assert verdict(strict, entry["answer"], **metadata) == WRONG_FORM
    assert verdict(strict, "Answer: certainly not", **metadata).score < 1


def test_gym_entries_survive_json_with_tuples_and_odd_keys():
    value = {"a": (1, [2, (3,)]), "b": {1: "x", (2, 3): "y"}, "c": None}
    assert gym._from_json(json.loads(json.dumps(gym._to_json(value)))) == value


def test_gym_seeds_share_no_rows_by_construction():
    def questions(seed):
        config = {"min_digits": 4, "min_terms": 5}
        rows = gym.generate(GeneratedSource(task="chain_sum", size=1, seed=seed, config=config))
        return {next(rows)["question"] for _ in range(50)}

    assert not questions(0) & questions(1)
    assert questions(0) == questions(0)


def test_names_in_metrics_all_differ():
    rewards = [ExactMatchReward(), LengthReward(), ExactMatchReward(), ExactMatchReward(name="strict")]
    assert reward_names(rewards) == ["exact", "length", "exact_2", "strict"]
    with pytest.raises(ValueError, match="'strict' is given twice"):
        reward_names([ExactMatchReward(name="strict"), LengthReward(name="strict")])
    assert reward_names([ExactMatchReward(name="exact_2"), ExactMatchReward(), ExactMatchReward()]) == [
        "exact_2", "exact", "exact_3"]


def test_a_pattern_that_does_not_compile_is_refused_in_the_spec():
    from pydantic import ValidationError

    with pytest.raises(ValidationError, match="not a regular expression"):
        ExactMatchReward(pattern="(")
