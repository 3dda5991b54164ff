"""Demonstrations and preference pairs: which rows are bad, what is tokenised, what is held out."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from engine.errors import DataError, ModelError, SpecError
from engine.prompts import PromptSet
from engine.spec import parse_spec
from tests.engine.data.preparing import prepare, quarantined, write_lines

HELD_OUT = {"prompt": "held out", "response": "h", "chosen": "c", "rejected": "r"}
DEMONSTRATIONS = [
    ({"prompt": "fine", "response": "yes"}, None),
    ({"prompt": "no response"}, "schema"),
    ({"prompt": "null", "response": None}, "schema"),
    ({"prompt": "number", "response": 7}, "schema"),
    ({"prompt": "messages", "response": [{"role": "assistant", "content": "a"}]}, "schema"),
    ({"prompt": "blank", "response": " \n"}, "empty"),
    (b'{"prompt": "half", "response": "\\ud800"}', "utf8"),
    ({"prompt": "fine", "response": "yes"}, "duplicate"),
    ({"prompt": "fine", "response": "another answer to it"}, None),
    ({"prompt": "held out", "response": "yes"}, "overlap"),
    ({"prompt": "long answer", "response": "word " * 200}, "overlong"),
    ({"prompt": "long " * 200, "response": "yes"}, "overlong"),
]
PAIRS = [
    ({"prompt": "fine", "chosen": "a", "rejected": "b"}, None),
    ({"prompt": "no rejected", "chosen": "a"}, "schema"),
    ({"prompt": "equal", "chosen": "a", "rejected": "a"}, "equal"),
    ({"prompt": "equal but for white space", "chosen": "a", "rejected": " a\n"}, "equal"),
    ({"prompt": "empty", "chosen": "", "rejected": "b"}, "empty"),
    ({"prompt": "fine", "chosen": "b", "rejected": "a"}, None),
    ({"prompt": "fine", "chosen": "a", "rejected": "b"}, "duplicate"),
    ({"prompt": "held out", "chosen": "a", "rejected": "b"}, "overlap"),
    ({"prompt": "long worse one", "chosen": "a", "rejected": "word " * 200}, "overlong"),
]


def make_spec(tmp_path: Path, tokenizer: Path, name: str, rows, **changes):
    """A spec with the set `name` of the file `rows` and one held-out row; all rows may be bad."""
    files = {name: write_lines(tmp_path / "t.jsonl", rows),
             f"{name}_eval": write_lines(tmp_path / "e.jsonl", [HELD_OUT])}
    sets = {key: {"sources": [{"kind": "file", "uri": file}]} for key, file in files.items()}
    return parse_spec({"stage": "prepare", "tokenizer": str(tokenizer), "output": str(tmp_path / "output"),
                       "max_prompt_tokens": 100, "max_sequence_tokens": 120, "max_bad_share": 1.0, **sets, **changes})


def rows_of(spec, name):
    return list(PromptSet.open(spec.output, name))


@pytest.mark.parametrize(("name", "cases"), [("sft", DEMONSTRATIONS), ("preferences", PAIRS)])
def test_each_bad_row_is_quarantined_with_its_line_and_kind(tmp_path, chat_tokenizer, name, cases):
    spec = make_spec(tmp_path, chat_tokenizer, name, [row for row, _ in cases])
    result = prepare(tmp_path, spec)
    expected = [("t.jsonl", line, kind) for line, (_, kind) in enumerate(cases, start=1) if kind]
    assert quarantined(tmp_path) == expected
    assert result.metrics[f"{name}/good"] == len(cases) - len(expected) == len(rows_of(spec, name))
    assert set(result.hashes) == {"spec", "tokenizer", f"prompts/{name}", f"prompts/{name}_eval"}


def test_a_response_ends_with_the_end_token_and_follows_the_tokens_that_the_rollout_is_given(tmp_path, chat_tokenizer):
    tokenizer = AutoTokenizer.from_pretrained(chat_tokenizer)
    rows = [{"prompt": "q", "chosen": "The answer is 4", "rejected": "5<|end|>", "source": "a person"}]
    prepare(tmp_path, spec := make_spec(tmp_path, chat_tokenizer, "preferences", rows))
    (row,) = rows_of(spec, "preferences")
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "q"}], add_generation_prompt=True, tokenize=False)
    assert list(row.token_ids) == tokenizer.encode(rendered, add_special_tokens=False)
    texts = [tokenizer.decode(ids) for ids in row.responses]
    assert texts == ["The answer is 4<|end|>", "5<|end|>"], "an end token that the text has is not doubled"
    assert all(ids[-1] == tokenizer.eos_token_id for ids in row.responses)
    assert row.metadata == {"source": "a person"} and row.answer == ""


def test_prompts_have_no_responses_and_need_no_limit_for_them(tmp_path, chat_tokenizer):
    rows = {"train": {"prompt": "p", "answer": "1", "response": "stays a column"}, "eval": {"prompt": "e", "answer": 2}}
    sets = {name: {"sources": [{"kind": "file", "uri": write_lines(tmp_path / f"{name}.jsonl", [row])}]}
            for name, row in rows.items()}
    spec = parse_spec({"stage": "prepare", "tokenizer": str(chat_tokenizer), "output": str(tmp_path / "output"),
                       "max_prompt_tokens": 100, **sets})
    prepare(tmp_path, spec)
    (row,) = rows_of(spec, "train")
    assert row.responses == () and row.metadata == {"response": "stays a column"}


def test_no_training_set_asks_what_any_held_out_set_asks(tmp_path, chat_tokenizer):
    """A model that is fine-tuned on the prompts it is evaluated on looks better than it is."""
    words = {name: write_lines(tmp_path / f"{name}.jsonl", [
        {"prompt": word, "answer": "1", "response": "a", "chosen": "a", "rejected": "b"} for word in content.split()])
        for name, content in {
            "eval": "one", "sft_eval": "two one", "preferences_eval": "three", "train": "one two three four",
            "sft": "one two three four", "preferences": "one two three four"}.items()}
    spec = parse_spec({
        "stage": "prepare", "tokenizer": str(chat_tokenizer), "output": str(tmp_path / "output"),
        "max_prompt_tokens": 100, "max_sequence_tokens": 120, "max_bad_share": 1.0,
        **{name: {"sources": [{"kind": "file", "uri": file}]} for name, file in words.items()}})
    prepare(tmp_path, spec)
    assert {name: [row.text for row in rows_of(spec, name)] for name in spec.sets} == {
        "eval": ["one"], "sft_eval": ["two", "one"], "preferences_eval": ["three"],
        "train": ["four"], "sft": ["four"], "preferences": ["four"]}


@pytest.mark.parametrize(("policy", "kept", "bad"), [
    ("quarantine", 1, 1), ("drop", 1, 0), ("cut_left", 1, 1), ("cut_right", 1, 1)])
def test_a_response_over_the_limit_is_never_cut(tmp_path, chat_tokenizer, policy, kept, bad):
    rows = [{"prompt": "q", "response": "a" * 200}, {"prompt": "q", "response": "a"}]
    spec = make_spec(tmp_path, chat_tokenizer, "sft", rows, overlong=policy)
    counts = prepare(tmp_path, spec).metrics
    assert (counts["sft/good"], counts.get("sft/bad", 0)) == (kept, bad)
    reason = "prompt has .* tokens and its longest response 201, max_sequence_tokens is 120"
    if bad:
        assert json.loads((tmp_path / "job" / "quarantine.jsonl").read_text())["kind"] == "overlong"
    error = make_spec(tmp_path, chat_tokenizer, "sft", rows, overlong="error")
    with pytest.raises(DataError, match=reason):
        prepare(tmp_path, error)


def test_generated_rows_answer_and_prefer_by_their_templates(tmp_path, chat_tokenizer):
    source = {"kind": "reasoning_gym", "task": "chain_sum", "size": 5,
              "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
    pairs = {"sources": [source | {"response": "unread", "chosen": "it is {answer}", "rejected": "it is 7", "seed": 1}]}
    shown = {"sources": [source | {"response": "{answer}", "seed": 2}]}
    spec = parse_spec({
        "stage": "prepare", "tokenizer": str(chat_tokenizer), "output": str(tmp_path / "output"),
        "max_prompt_tokens": 100, "max_sequence_tokens": 120, "preferences": pairs, "sft": shown,
        "preferences_eval": {"sources": [source | {"rejected": "no", "seed": 3}]},
        "sft_eval": {"sources": [source | {"seed": 4}]}})
    prepare(tmp_path, spec)
    tokenizer = AutoTokenizer.from_pretrained(chat_tokenizer)
    for row in rows_of(spec, "preferences"):
        texts = [tokenizer.decode(ids) for ids in row.responses]
        assert texts == [f"it is {row.answer}<|end|>", "it is 7<|end|>"] and row.answer != "7"
    assert all(tokenizer.decode(row.responses[0]) == f"{row.answer}<|end|>" for row in rows_of(spec, "sft"))


def test_a_tokenizer_without_end_token_is_refused(tmp_path, chat_tokenizer):
    tokenizer = AutoTokenizer.from_pretrained(chat_tokenizer)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "endless")
    spec = make_spec(tmp_path, tmp_path / "endless", "sft", [{"prompt": "q", "response": "a"}])
    with pytest.raises(ModelError, match="has no end token"):
        prepare(tmp_path, spec)


@pytest.mark.parametrize(("change", "message"), [
    ({"sft_eval": None}, "sft_eval: is missing, but there is sft"),
    ({"max_sequence_tokens": None}, "max_sequence_tokens: is needed by sft"),
    ({"sft": None, "sft_eval": None}, "sets: none is given"),
])
def test_sets_that_are_not_whole_are_refused(tmp_path, chat_tokenizer, change, message):
    with pytest.raises(SpecError, match=message):
        make_spec(tmp_path, chat_tokenizer, "sft", [], **change)


def test_generated_pairs_without_a_worse_response_are_refused(tmp_path, chat_tokenizer):
    source = {"sources": [{"kind": "reasoning_gym", "task": "chain_sum", "size": 5}]}
    with pytest.raises(SpecError, match=r"preferences.sources\[0\].rejected: None must be a template"):
        make_spec(tmp_path, chat_tokenizer, "preferences", [], preferences=source)
