"""The note of a run: what is kept of people's words, and of what tasks said."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from tasks import notes

words = st.text(alphabet="ab *\n", max_size=1200)
sentences = st.lists(st.text(alphabet="ab *\n", min_size=1, max_size=600), min_size=1, max_size=4)


@given(words, sentences)
def test_a_note_begins_with_what_people_wrote_and_fits_airflows_column(old, said):
    note = notes.compose(old, said)
    assert len(note) <= notes.LIMIT
    theirs = old.rstrip()
    assert note.startswith(theirs[: notes.LIMIT - 1])


@given(st.text(alphabet="ab *", max_size=100), st.lists(st.text(alphabet="ab ", min_size=1, max_size=50), min_size=1,
                                                       max_size=3), st.text(alphabet="cd", min_size=1, max_size=50))
def test_the_next_end_of_a_run_replaces_our_part_alone(old, first, second):
    assert notes.compose(notes.compose(old, first), [second]) == notes.compose(old, [second])


def test_a_run_without_a_note_gets_ours():
    assert notes.compose(None, ["one", "two"]) == "**Ratchet:** one\n\ntwo"


def test_a_failing_task_says_which_and_why():
    said = {}
    ti = SimpleNamespace(task_id="begin", xcom_push=lambda key, value: said.update({key: value}))
    notes.failed({"ti": ti, "exception": ValueError("SpecError: train.lr: must be a number")})
    assert said == {notes.NOTE: "`begin` failed: SpecError: train.lr: must be a number"}
