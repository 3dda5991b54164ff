"""The engine's log as a task shows it."""

from hypothesis import given
from hypothesis import strategies as st

from tasks.joblog import LogFollower, readable


@given(text=st.lists(st.text(alphabet="aé\n", max_size=6), max_size=6))
def test_every_line_is_shown_once_whatever_the_moments_of_writing(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("log") / "log.txt"
    follower, shown = LogFollower(path), []
    assert follower.lines() == []
    for piece in text:
        # Cut inside characters too: a writer's buffer knows no letters.
        for byte in piece.encode():
            with open(path, "ab") as file:
                file.write(bytes([byte]))
            shown += follower.lines()
    shown += follower.lines(final=True)
    whole = "".join(text)
    assert shown == (whole.removesuffix("\n").split("\n") if whole else [])


def test_a_task_that_takes_over_shows_only_the_last_lines(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text("".join(f"line {i}\n" for i in range(100)))
    follower = LogFollower(path, last_lines=2)
    assert follower.lines() == ["line 98", "line 99"]
    with open(path, "a") as file:
        file.write("line 100\n")
    assert follower.lines() == ["line 100"]


def test_events_become_sentences_and_everything_else_stays():
    event = '{"event": "iteration", "s": 12.3, "iteration": 3, "of": 10, "reward": 0.123456}'
    assert readable(event) == "[12 s] iteration: iteration 3, of 10, reward 0.1235"
    assert readable('{"event": "done"}') == "done"
    for line in ("plain", '{"event": torn', '{"other": 1}', ""):
        assert readable(line) == line
