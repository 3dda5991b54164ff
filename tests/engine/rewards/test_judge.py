import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from engine.rewards import judge as judge_module
from engine.rewards.judge import Judge
from engine.rewards.outcome import Case, Outcome
from engine.rewards.pool import ScoringPool
from engine.spec.reward import ExactMatchReward, JudgeReward
from tests.engine.rewards.scoring import scorable


class Server:
    """An OpenAI-compatible chat server whose replies the test decides."""

    def __init__(self):
        self.requests = []
        self.times = []
        self.busy = self.most_busy = 0
        self.reply = lambda number, question: (200, "7", {})
        """(number of the request, question) -> status, content of the message, headers."""
        self._lock = threading.Lock()

    def answer(self, handler):
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self._lock:
            number = len(self.requests)
            self.requests.append((handler.path, dict(handler.headers), body))
            self.times.append(time.monotonic())
            self.busy += 1
            self.most_busy = max(self.most_busy, self.busy)
        status, content, headers = self.reply(number, body["messages"][0]["content"])
        with self._lock:
            self.busy -= 1
        message = {"choices": [{"message": {"role": "assistant", "content": content}}]}
        text = (content if isinstance(content, bytes) else json.dumps(message).encode())
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(text)))
        handler.end_headers()
        handler.wfile.write(text)


@contextmanager
def serving(server):
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            server.answer(self)

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_port}/v1"
    finally:
        http.shutdown()
        http.server_close()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(judge_module, "FIRST_WAIT_S", 0.01)
    server = Server()
    with serving(server) as server.url:
        yield server


def reward(server, **changes):
    return JudgeReward(**({"url": server.url, "model": "m", "max_requests_per_s": 10_000} | changes))


def case(response="r", prompt="p", answer="a"):
    return Case(response, prompt, answer, {}, 1, 10)


def test_grades_are_scaled_and_in_order(server):
    server.reply = lambda number, question: (200, f"Grade: {question.rsplit(maxsplit=1)[-1]}", {})
    grades = Judge(reward(server)).grade([case(str(i)) for i in (3, 10, 0, 7)])
    assert grades == [(Outcome.SCORED, grade, "") for grade in (0.3, 1.0, 0.0, 0.7)]
    path, _, body = server.requests[0]
    assert path == "/v1/chat/completions" and body["model"] == "m" and body["temperature"] == 0


def test_the_template_is_filled_in_once_so_that_a_response_cannot_ask_for_the_reference(server):
    template = "{prompt}|{answer}|{response}|{other}"
    Judge(reward(server, prompt=template)).grade([case("{answer} {prompt}", "q {response}", "secret")])
    assert server.requests[0][2]["messages"][0]["content"] == "q {response}|secret|{answer} {prompt}|{other}"


def test_equal_questions_are_asked_once_also_in_later_calls(server):
    judge = Judge(reward(server))
    first = judge.grade([case("x"), case("y"), case("x")])
    assert judge.grade([case("y"), case("x"), case("z")])[:2] == first[:2][::-1]
    assert len(server.requests) == 3


def test_failures_are_not_remembered(server):
    server.reply = lambda number, question: (400, "", {}) if number == 0 else (200, "5", {})
    judge = Judge(reward(server))
    assert judge.grade([case()])[0][0] is Outcome.ERROR
    assert judge.grade([case()]) == [(Outcome.SCORED, 0.5, "")]


def test_the_cache_is_bounded_and_right_while_it_is_emptied(server, monkeypatch):
    monkeypatch.setattr(judge_module, "CACHE_ENTRIES", 2)
    judge = Judge(reward(server))
    for _ in range(3):
        assert [grade for _, grade, _ in judge.grade([case(str(i)) for i in range(5)])] == [0.7] * 5
    assert len(judge._cache) == 2


@pytest.mark.parametrize("status", [429, 500, 503])
def test_throttling_and_server_errors_are_tried_again(server, status):
    server.reply = lambda number, question: (status, "", {}) if number < 3 else (200, "5", {})
    assert Judge(reward(server)).grade([case()]) == [(Outcome.SCORED, 0.5, "")]
    assert len(server.requests) == 4


def test_retries_end(server):
    server.reply = lambda number, question: (503, "", {})
    ((outcome, _, message),) = Judge(reward(server, max_retries=2)).grade([case()])
    assert outcome is Outcome.ERROR and "HTTP 503, 3 times" in message and len(server.requests) == 3


def test_the_server_may_ask_for_a_longer_wait(server):
    server.reply = lambda number, question: (429, "", {"Retry-After": "0.3"}) if number == 0 else (200, "5", {})
    Judge(reward(server)).grade([case()])
    assert server.times[1] - server.times[0] >= 0.3


@pytest.mark.parametrize("status", [400, 401, 404])
def test_a_request_that_cannot_succeed_is_not_repeated(server, status):
    server.reply = lambda number, question: (status, "", {})
    assert Judge(reward(server)).grade([case()])[0][0] is Outcome.ERROR
    assert len(server.requests) == 1


@pytest.mark.parametrize(("content", "message"), [
    ("no number", "no grade in its reply"), ("11", "not in"), ("-1", "not in"), (b"{}", "no choices"),
    (b"<html>", "Expecting value"), (b"[]", "no choices"), (None, "no choices"),
])
def test_replies_without_a_grade_are_errors(server, content, message):
    server.reply = lambda number, question: (200, content, {})
    ((outcome, _, text),) = Judge(reward(server)).grade([case()])
    assert outcome is Outcome.ERROR and message in text


def test_a_slow_judge_is_a_time_out(server):
    server.reply = lambda number, question: (time.sleep(1.5), (200, "5", {}))[1]
    ((outcome, _, _),) = Judge(reward(server, timeout_s=0.3)).grade([case()])
    assert outcome is Outcome.TIMEOUT


def test_no_server_is_an_error_with_its_address(server):
    address = "http://127.0.0.1:9/v1"
    ((outcome, _, message),) = Judge(reward(server, url=address, max_retries=1)).grade([case()])
    assert outcome is Outcome.ERROR and address in message


def test_no_more_requests_at_once_and_a_second_than_allowed(server):
    server.reply = lambda number, question: (time.sleep(0.05), (200, "5", {}))[1]
    Judge(reward(server, max_concurrent=3)).grade([case(str(i)) for i in range(12)])
    assert server.most_busy <= 3
    server.times.clear()
    Judge(reward(server, max_requests_per_s=20)).grade([case(str(i)) for i in range(8)])
    assert server.times[-1] - server.times[0] >= 7 / 20 - 0.05


def test_the_key_travels_in_its_header_and_nowhere_else(server, monkeypatch):
    monkeypatch.setenv("RATCHET_JUDGE_KEY", "CANARY")
    server.reply = lambda number, question: (401, "", {})
    ((_, _, message),) = Judge(reward(server)).grade([case()])
    _, headers, body = server.requests[0]
    assert headers["Authorization"] == "Bearer CANARY" and "CANARY" not in json.dumps(body) + message
    assert "CANARY" not in reward(server).model_dump_json()


def test_the_pool_adds_judges_to_its_other_rewards(server):
    server.reply = lambda number, question: (200, "5", {}) if "good" in question else (400, "", {})
    rewards = [ExactMatchReward(), reward(server, weight=2, on_error=-1)]
    with ScoringPool(rewards, num_workers=1) as pool:
        scores = pool.score([scorable("good", answer="good"), scorable("bad", answer="worse")])
    assert scores.by_name == {"exact": [1.0, 0.0], "judge": [0.5, -1.0]} and scores.total == [2.0, -2.0]
    assert scores.errors == [False, True] and "HTTP Error 400" in scores.messages[0]
