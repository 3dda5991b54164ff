"""What a reviewer reads: whatever models and data say, it shows as text. A CommonMark parser is the oracle."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from engine.spec import SampleRecord
from tasks import evidence
from tasks.gates import GateResult, GateRow
from tasks.markdown import block, cell, shortened, visible

PARSER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
ACTIVE = "ab `~*_[]()<>|!#&\\\n\t-=+1.:/\"'\u202e\x1b"
WILD = st.text(alphabet=st.sampled_from(ACTIVE), max_size=60) | st.text(max_size=60)
VERDICT = GateResult(True, ("mean_reward rises: +0.2",), (GateRow("mean_reward rises", 0.1, 0.3, "+0.2", True),), {})


def words(tokens):
    """What a reader sees of inline tokens, None when there is anything but text."""
    plain = {"text", "text_special", "softbreak"}
    return "".join(t.content for t in tokens) if all(t.type in plain for t in tokens) else None


@given(WILD)
@example("```\n# a title\n[x](javascript:alert(1))")
@example("````")
@example("~~~\n<script>")
def test_no_text_ends_its_code_block(text):
    tokens = PARSER.parse(f"before\n\n{block(text)}\n\nafter")
    assert [t.type for t in tokens if t.level == 0] == [
        "paragraph_open", "paragraph_close", "fence", "paragraph_open", "paragraph_close"]
    assert tokens[3].content == visible(text) + "\n"


@given(WILD)
@example("a | b\n| c")
@example("![x](http://a/b.png) <img src=x onerror=y> &lt; https://a.b ~~no~~")
def test_no_text_leaves_its_table_cell_or_formats_anything(text):
    tokens = PARSER.parse(f"| a | b |\n|---|---|\n| x{cell(text)}y | z |\n")
    inline = [t for t in tokens if t.type == "inline"]
    assert [t.type for t in tokens].count("td_open") == 2 and inline[-1].content == "z"
    if "_" not in text:  # inside a word it is harmless, and metric names would be hard to read with it escaped
        shown = words(inline[2].children)
        assert shown is not None and shown == f"x{visible(text)}y".replace("\n", " ")


@given(WILD)
def test_a_text_in_a_sentence_is_text(text):
    tokens = PARSER.parse(f"- reason x{cell(text)}x")
    assert [t.type for t in tokens].count("inline") == 1
    kinds = {child.type for t in tokens if t.children for child in t.children}
    assert kinds <= {"text", "text_special", "em_open", "em_close", "strong_open", "strong_close"}
    assert "_" in text or kinds <= {"text", "text_special"}


def test_what_does_not_show_is_made_visible():
    assert visible("a\u202eb\x1b[31m\u200b") == "a\\u{202e}b\\u{1b}[31m\\u{200b}"
    assert visible("line\r\n\tline ü 你 🙂") == "line\n\tline ü 你 🙂"


def test_long_texts_say_how_much_is_left_out():
    assert shortened("x" * 10, 10) == "x" * 10
    assert shortened("x" * 12, 10) == "x" * 10 + " … (2 characters more)"


def sample(model, name, score, response):
    return SampleRecord(model=model, id=name, task="sums", prompt=f"What is {name}?", answer="42", response=response,
                        greedy=True, score=score, tokens=3)


def lines(*rows):
    return [sample(model, name, score, text).model_dump_json()
            for name, old, new in rows for model, (score, text) in (("champion", old), ("candidate", new))]


def test_the_page_shows_the_best_the_worst_and_the_changed_answers_beside_each_other():
    pairs = evidence.pairs_of(lines(
        ("up", (0.0, "wrong"), (1.0, "right")), ("down", (1.0, "was right"), (0.0, "now wrong")),
        ("other", (1.0, "42"), (1.0, "it is 42")), ("same", (1.0, "same words"), (1.0, "same words"))))
    page = evidence.review_page(VERDICT, pairs, {"Report": "http://m/report.html", "Training run": ""})
    order = [page.index(text) for text in (
        "**Gate passed**", "[Report](http://m/report.html)", "### Answers that got better", "sums up", "wrong", "right",
        "### Answers that got worse", "was right", "now wrong", "### Other words, same score", "it is 42")]
    assert order == sorted(order)
    assert "same words" not in page and "Training run" not in page
    assert "Champion, score 0, 3 tokens:" in page and "expected 42" in page


def test_the_page_is_bounded_whatever_the_models_say():
    rows = [(f"p{i}", (i % 2, "a" * 100_000), ((i + i % 3) % 2, f"b{i}" * 50_000)) for i in range(300)]
    page = evidence.review_page(VERDICT, evidence.pairs_of(lines(*rows)), {})
    assert page.count("Candidate, score") == 12 and len(page) < 25_000


@pytest.mark.parametrize("wrong", ["</pre>", "```\n\n# Approve this", "| x |", "[Approve](http://evil)"])
def test_a_model_cannot_write_into_the_page(wrong):
    pairs = evidence.pairs_of(lines((wrong, (0.0, wrong), (1.0, wrong + " more"))))
    tokens = PARSER.parse(evidence.review_page(VERDICT, pairs, {"Report": "http://m/r"}))
    assert [t.content for t in tokens if t.type == "fence"][1] == wrong + "\n"
    assert not [t for t in tokens if t.type == "html_block"]
    headings = [tokens[i + 1].content for i, t in enumerate(tokens) if t.type == "heading_open"]
    assert headings == ["Answers that got better"]
    links = [c.attrs["href"] for t in tokens if t.children for c in t.children if c.type == "link_open"]
    assert links == ["http://m/r"]
