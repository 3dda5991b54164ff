"""Files that land: whole ones, once each, and none that is still being written. On a disk and on S3."""

import gzip
import json
import os
from collections import defaultdict
from types import SimpleNamespace

import pytest
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException
from hypothesis import given
from hypothesis import strategies as st

from engine import store
from tasks import landing
from tasks.assets import PROMPTS
from tests.engine.s3_server import s3_server


def lines(*prompts, **fields):
    return "".join(json.dumps({"prompt": prompt, "answer": "1", **fields}) + "\n" for prompt in prompts).encode()


class Watched:
    """A prefix, and the DAG run by run."""

    def __init__(self, prefix):
        self.prefix, self.runs, self.now_s = prefix, 0, 1e9
        self.announced, self.refused = [], {}

    def put(self, name, content):
        store.write_bytes(store.join(self.prefix, name), content)

    def look(self, settle_s=0, after_s=60.0, again=False):
        """One run of the DAG, or another try of the last one; the sources that were announced."""
        self.runs += not again
        self.now_s += after_s
        kept = {}
        ti = SimpleNamespace(
            run_id=f"look-{self.runs}", xcom_push=lambda key, value: kept.update({key: value}),
            xcom_pull=lambda task_ids, key="return_value": kept.get(key))
        events = defaultdict(SimpleNamespace)
        try:
            kept["return_value"] = landing.look(
                params={"prefix": self.prefix, "settle_s": settle_s}, ti=ti, outlet_events=events)
        except AirflowSkipException as skipped:
            self.reason = str(skipped)
        extra = events[PROMPTS].extra if PROMPTS in events else {"uris": [], "sha256": [], "rows": 0}
        self.announced += extra["uris"]
        self.extra, self.refused = extra, kept["refused"]
        self.finish = lambda: landing.report(ti=ti)
        return [landing.Landed.model_validate_json(store.read_bytes(f"{uri.rsplit('/', 1)[0]}/landed.json")).source.
                removeprefix(f"{self.prefix}/") for uri in extra["uris"]]

    def run(self, **settings):
        """A look and its report, when nothing was refused."""
        found = self.look(**settings)
        try:
            self.finish()
        except AirflowSkipException:
            assert not found
        return found


@pytest.fixture(params=["disk", "s3"])
def watched(request, tmp_path, monkeypatch):
    monkeypatch.setenv("RATCHET_HOME", str(tmp_path))
    if request.param == "disk":
        monkeypatch.setenv("RATCHET_STORE", str(tmp_path / "store"))
        made = Watched(str(tmp_path / "inbox"))
        monkeypatch.setattr(landing.time, "time", lambda: made.now_s)
        yield made
        return
    with s3_server(monkeypatch):
        monkeypatch.setenv("RATCHET_STORE", "s3://bucket/store")
        made = Watched("s3://bucket/inbox")
        # Not for boto3, which signs by the clock: landing asks a clock of its own here.
        monkeypatch.setattr(landing, "time", SimpleNamespace(time=lambda: made.now_s))
        yield made


def test_a_file_lands_at_the_second_look_and_never_again(watched):
    assert watched.run() == []
    watched.put("team/a.jsonl", lines("1+1?", "2+2?"))
    assert watched.run() == [] and "waiting: ['team/a.jsonl']" in watched.reason
    assert watched.run() == ["team/a.jsonl"]
    uri = watched.extra["uris"][0]
    assert uri.endswith("/a.jsonl") and store.read_bytes(uri) == lines("1+1?", "2+2?")
    assert watched.extra == {"uris": [uri], "sha256": [store.sha256_bytes(store.read_bytes(uri))], "rows": 2}
    assert watched.run() == watched.run() == []
    [record] = landing.landed()
    assert (record.source, record.rows, record.bad_rows, record.run_id) == (
        f"{watched.prefix}/team/a.jsonl", 2, 0, "look-3")


def test_a_file_without_a_marker_settles_and_one_with_a_marker_needs_not(watched):
    watched.put("a.jsonl", lines("a"))
    watched.put("b.jsonl", lines("b"))
    watched.put("b.jsonl.done", b"")
    watched.put("days/1.jsonl.gz", gzip.compress(lines("c")))
    watched.put("days/_SUCCESS", b"")
    assert watched.run(settle_s=300) == []
    assert sorted(watched.run(settle_s=300)) == ["b.jsonl", "days/1.jsonl.gz"]
    assert watched.run(settle_s=300) == []
    assert watched.run(settle_s=300, after_s=200) == ["a.jsonl"]


def test_a_file_that_grows_lands_when_it_is_whole(watched):
    written = b""
    for row in range(4):
        written += lines(f"row {row}")
        watched.put("a.jsonl", written)
        assert watched.run() == []
    assert watched.run() == ["a.jsonl"] and watched.extra["rows"] == 4


def test_a_file_that_changes_while_it_is_read_does_not_land(watched, monkeypatch):
    plain = store.download_file

    def download(uri, target):
        plain(uri, target)
        monkeypatch.setattr(store, "download_file", plain)
        watched.put("a.jsonl", lines("old", "new"))

    watched.put("a.jsonl", lines("old"))
    watched.run()
    monkeypatch.setattr(store, "download_file", download)
    assert watched.run() == [] and landing.landed() == []
    watched.run()
    assert watched.run() == ["a.jsonl"] and watched.extra["rows"] == 2


def test_bad_files_are_refused_with_reasons_and_do_not_stop_the_others(watched):
    wrong = {
        "text.jsonl": (b"hello\n", "line 1: not JSON"), "empty.jsonl": (b"", "no rows"),
        "other.jsonl": (json.dumps({"question": "?"}).encode(), "line 1: no field 'prompt'"),
        "answer.jsonl": (json.dumps({"prompt": "?"}).encode(), "no field 'answer'"),
        "roles.jsonl": (lines([{"role": "bot", "content": "x"}]), "prompt[0].role is 'bot'"),
        "cut.jsonl.gz": (gzip.compress(lines("x"))[:-9], "gzip"),
        "two.jsonl": (lines(*map(str, range(98))) + b"[]\n[]\n", "2 of 100 rows are bad")}
    for name, (content, _) in wrong.items():
        watched.put(name, content)
    watched.put("good.jsonl", lines(*map(str, range(99))) + b"[]\n")
    assert watched.run() == [] and watched.look() == ["good.jsonl"]
    assert watched.extra["rows"] == 99
    assert watched.refused.keys() == wrong.keys()
    for name, (_, reason) in wrong.items():
        assert reason in watched.refused[name]
    with pytest.raises(AirflowFailException, match=r"other.jsonl: 1 of 1 rows are bad .*no field 'prompt'"):
        watched.finish()

    watched.look(again=True)
    assert watched.refused.keys() == wrong.keys(), "a second try of a look that had died says the same"
    watched.finish = lambda: None

    watched.put("other.jsonl", lines("now it is right"))
    watched.look()
    assert watched.refused == {}, "neither announced again, nor refused again"
    assert watched.run() == ["other.jsonl"]


def test_the_same_content_lands_once_under_whatever_name_and_changed_content_again(watched):
    watched.put("a.jsonl", lines("a"))
    watched.run()
    assert watched.run() == ["a.jsonl"]
    watched.put("copy.jsonl", lines("a"))
    watched.put("a.jsonl", lines("a", "b"))
    watched.run()
    assert watched.run() == ["a.jsonl"]
    assert [record.rows for record in landing.landed()] == [1, 2]


def test_what_landed_before_a_crash_is_announced_by_the_next_look(watched, monkeypatch):
    watched.put("a.jsonl", lines("a"))
    watched.run()
    with monkeypatch.context() as broken:
        broken.setattr(landing, "_write_inbox", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            watched.look()
    assert watched.look() == ["a.jsonl"], "the file had landed, its state was lost"
    assert watched.look() == ["a.jsonl"], "the look before it did not come to note that it was announced"
    watched.finish()
    assert watched.run() == [] and len(landing.landed()) == 1


def test_a_lost_state_lands_nothing_twice(watched):
    watched.put("a.jsonl", lines("a"))
    watched.run()
    watched.run()
    store.delete(store.join(landing._folder("inbox.json")))
    assert [watched.run() for _ in range(3)] == [[], [], []] and len(landing.landed()) == 1


def test_names_of_writers_at_work_and_other_files_are_left_alone(watched):
    for name in (".a.jsonl.Xy12", ".a.jsonl", "_temporary/0/a.jsonl", "a.jsonl.tmp", "a.jsonl.part", "a.part.jsonl",
                 "a.tmp.jsonl.gz", "a.json", "a.parquet", "readme.md", "b/.staging/a.jsonl"):
        watched.put(name, lines("a"))
    assert [watched.run() for _ in range(3)] == [[], [], []] and "0 files" in watched.reason


def test_a_prefix_that_holds_the_landed_files_is_refused(watched):
    for prefix in (os.path.dirname(watched.prefix), landing._folder(), landing._folder("landed", "x")):
        with pytest.raises(AirflowFailException, match="overlap"):
            landing.look(params={"prefix": prefix, "settle_s": 0}, ti=SimpleNamespace(run_id="r"))


states = st.fixed_dictionaries({"bytes": st.integers(0, 2), "modified": st.integers(0, 1).map(float)})
moments = st.lists(st.tuples(st.integers(0, 40), st.none() | states, st.booleans()), max_size=12)


@given(moments, st.integers(0, 60))
def test_ready_means_unchanged_since_the_look_before_and_marked_or_settled(history, settle_s):
    before, now, seen = {}, 0.0, []
    for step, state, marked in history:
        now += step
        seen.append((now, state))
        found = [store.StoredFile(name="a.jsonl", **state)] if state else []
        found += [store.StoredFile(name="a.jsonl.done", bytes=0, modified=0.0)] if marked else []
        before, ready = landing.compare(before, found, now, settle_s)
        # The oracle looks back over the whole history: since when has the file been what it is?
        same = [when for when, _ in reversed(_unbroken(seen))]
        whole = state is not None and len(same) >= 2 and (marked or now - same[0] >= settle_s)
        assert ready == (["a.jsonl"] if whole else [])


def _unbroken(seen):
    """The looks, newest first, that saw what the newest saw."""
    found = []
    for when, state in reversed(seen):
        if state != seen[-1][1]:
            break
        found.append((when, state))
    return found
