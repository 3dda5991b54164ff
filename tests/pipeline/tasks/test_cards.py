"""The plugin's pages: what is shown, what is a link, and that nothing a model or a person wrote becomes HTML."""

import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.spec.report import GATE_SLOT, VERDICT_SLOT
from tasks import cards

VERDICT = {"version": "3", "passed": False, "reasons": ["limit <kl>: 9 is above 1"], "detectable": {}, "table": [
    {"check": "mean_reward rises", "champion": 0.25, "candidate": 0.123456, "evidence": "+0.25", "passed": True},
    {"check": "limit <kl>", "champion": None, "candidate": "</section>", "evidence": "<b>9</b>", "passed": False}]}
REPORT = f"<h1>r</h1>{''.join(VERDICT_SLOT)}<p>before</p>{''.join(GATE_SLOT)}<p>after</p>"


class Tags(HTMLParser):
    """The tags, links and words of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.words = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name == "href"]

    def handle_data(self, data):
        self.words += data


def test_the_card_shows_result_links_and_verdict():
    found = Tags(cards.page(cards.Card(
        title="tiny: ppo", links={"MLflow run": "http://m/#/1", "Report": "/ratchet/runs/d/r/report"},
        facts={"preset": "tiny", "candidate": ""}, verdict=VERDICT,
        said=("candidate **tiny/3** from `x`. [MLflow](http://m), [report](http://r)",),
        models={"base": {"mean_reward": 0.1}, "stage 1": {"mean_reward": 0.5, "mean_reward_low": 0.4,
                                                          "mean_reward_high": 0.6}})))
    assert "MLflow, report" not in found.words
    assert found.links == ["http://m/#/1", "/ratchet/runs/d/r/report"]
    for words in ("tiny: ppo", "preset", "candidate tiny/3 from x.", "gate failed", "mean reward", "0.5", "[0.4, 0.6]",
                  "limit <kl>: 9 is above 1", "0.1235", "✗"):
        assert words in found.words, words


@pytest.mark.parametrize("address", ["javascript:alert(1)", "data:text/html,x", "", "ftp://x"])
def test_only_web_addresses_become_links(address):
    assert Tags(cards.page(cards.Card(title="t", links={"x": address}))).links == []


@given(st.text(alphabet='<>&"\'/abc!-[]()`*', max_size=40))
def test_no_text_changes_what_the_page_is_made_of(text):
    def card(words):
        row = {"check": words, "champion": words, "candidate": words, "evidence": words, "passed": True}
        return cards.Card(
            title=words, links={words: "http://m"}, facts={"fact": words + "."}, said=(words,), models={
                words: {"mean_reward": 0.1}}, verdict={"passed": True, "reasons": [words], "table": [row]})

    assert Tags(cards.page(card(text))).tags == Tags(cards.page(card("plain"))).tags


def test_the_policy_lets_exactly_the_pages_own_script_run():
    scripts = re.findall(r"<script>(.*?)</script>", cards.page(cards.Card(title="t")), re.DOTALL)
    assert scripts == [cards.SCRIPT]
    assert not re.search(r"\son\w+=", cards.page(cards.Card(title="t", verdict=VERDICT)))


def test_a_verdict_fills_its_two_places_and_a_later_one_replaces_it():
    once = cards.with_gate(REPORT, VERDICT)
    assert [once.index(part) for part in ("gate failed", "<p>before", "limit &lt;kl&gt;", "<p>after")] == sorted(
        once.index(part) for part in ("gate failed", "<p>before", "limit &lt;kl&gt;", "<p>after"))
    assert cards.with_gate(once, VERDICT) == once
    assert cards.with_gate(once, VERDICT | {"passed": True}) == cards.with_gate(REPORT, VERDICT | {"passed": True})


def test_a_report_without_the_places_stays_as_it_is():
    assert cards.with_gate("<h1>old</h1>", VERDICT) == "<h1>old</h1>"


def test_before_the_review_there_is_no_verdict():
    assert "gate" not in Tags(cards.page(cards.Card(title="t"))).words.lower().replace(cards.SCRIPT.lower(), "")
