import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.prepare.sources import read_file
from engine.rows import BadRow, Candidate, Row, check_row
from engine.spec import FileSource
from tests.engine.data.preparing import make_spec, prepare, quarantined, train_rows

SOURCE = FileSource(uri="x.jsonl", tools_field="tools")
KINDS = {"utf8", "json", "schema", "empty"}

text = st.text(st.characters(codec=None, exclude_categories=()), max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3), max_leaves=8)
words = st.sampled_from(["user", "system", "hi", ""])
messages = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "name"]), words | values) | values, max_size=3)
rows = st.dictionaries(
    st.sampled_from(["prompt", "answer", "task", "tools", "other"]) | text, values | messages | text, max_size=5)


@settings(deadline=None, max_examples=300)
@given(rows, st.booleans())
def test_any_row_is_a_candidate_that_can_be_written_or_a_bad_row(fields, chat):
    before = repr(fields)
    outcome = check_row(Row("x.jsonl", 3, fields), SOURCE, chat)
    assert repr(fields) == before
    if isinstance(outcome, BadRow):
        assert (outcome.file, outcome.line) == ("x.jsonl", 3) and outcome.kind in KINDS and outcome.reason
        return
    assert outcome.text.strip()
    assert len(outcome.digest()) == len(outcome.asked_digest()) == 16
    # As the shard writer does; NaN and lone surrogates would be refused here.
    written = [outcome.content, outcome.metadata, outcome.answer, outcome.task, outcome.tools]
    json.dumps(written, allow_nan=False, ensure_ascii=False).encode()
    assert isinstance(outcome.content, str) != chat or isinstance(fields["prompt"], list)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=30) | rows.map(lambda row: json.dumps(row).encode()), max_size=6))
def test_any_bytes_are_read_to_the_end_with_right_line_numbers(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("fuzz") / "x.jsonl"
    content = b"\n".join(lines)
    path.write_bytes(content)
    # Blank lines are no rows. JSON lines end with \n alone.
    expected = [number for number, line in enumerate(content.split(b"\n"), start=1) if line.strip()]
    assert [row.line for row in read_file(str(path))] == expected


@pytest.mark.parametrize("name", ["a", "b"])
def test_digests_depend_on_every_word_and_role_but_not_on_the_answer(name):
    def candidate(answer="1", role="user", content="hi", tools=None):
        return Candidate("f", 1, [{"role": role, "content": content}], answer, "t", {name: 1}, tools)

    base = candidate().digest()
    assert candidate(answer="2").digest() == base == candidate(content=" hi\n").digest()
    others = [candidate(role="system"), candidate(content="ho"), candidate(tools=[{"name": "x"}])]
    assert len({base, *(other.digest() for other in others)}) == 4


@settings(deadline=None, max_examples=15)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["ok", "bad", "raw"])), max_size=12))
def test_every_row_is_counted_once_and_the_first_of_equal_prompts_stays(tmp_path_factory, chat_tokenizer, plan):
    tmp_path = tmp_path_factory.mktemp("fuzz")
    lines, expected, good = [], [], []
    for number, (letter, form) in enumerate(plan, start=1):
        row = json.dumps({"prompt": letter, "answer": ""})
        lines.append({"ok": row, "bad": "{", "raw": json.dumps([letter])}[form])
        kind = {"ok": "duplicate" if letter in good else None, "bad": "json", "raw": "schema"}[form]
        good += [letter] if kind is None else []
        expected += [("t.jsonl", number, kind)] if kind else []
    (tmp_path / "t.jsonl").write_text("\n".join([json.dumps({"prompt": "first", "answer": ""}), *lines]))
    counts = prepare(tmp_path, spec := make_spec(tmp_path, chat_tokenizer, str(tmp_path / "t.jsonl"))).metrics
    assert [prompt.text for prompt in train_rows(spec)] == ["first", *good]
    assert quarantined(tmp_path) == [(file, line + 1, kind) for file, line, kind in expected]
    assert counts["train/rows"] == len(plan) + 1 == counts["train/good"] + counts.get("train/bad", 0)
