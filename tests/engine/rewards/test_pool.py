import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from engine.errors import FaultError
from engine.rewards import pool as pool_module
from engine.rewards import workers
from engine.rewards.outcome import Outcome
from engine.rewards.pool import ScoringPool
from engine.spec.reward import (
    CodeReward,
    ExactMatchReward,
    LengthReward,
    MathVerifyReward,
    NumericMatchReward,
    ReasoningGymReward,
    RegexReward,
)
from tests.engine.rewards.scoring import scorable

ENDLESS = "a" * 60
"""A response on which the pattern below backtracks for years."""
BACKTRACKING = r"(a+)+b"


def worker_pids(pool: ScoringPool) -> list[int]:
    """Of workers that have greeted: those of the others are 0, which `os.kill` takes for this whole process group."""
    return [worker.pid for worker in pool._workers() if worker.pid]


def wait_until(condition, what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.fixture(scope="module")
def patient():
    """A pool whose regex reward may take a minute; shared by tests that leave it working."""
    with ScoringPool([ExactMatchReward(), RegexReward(pattern=BACKTRACKING, timeout_s=60, on_error=-1)], 2) as pool:
        pool.score([scorable("a")])
        yield pool


def test_scores_are_in_order_whatever_the_chunks_and_sum_with_weights():
    strict = ExactMatchReward(pattern=r"(\d+)", format_score=0.5)
    rewards = [strict, LengthReward(weight=0.1), ExactMatchReward(weight=-1)]
    with ScoringPool(rewards, num_workers=3) as pool:
        for count in (1, 2, 7, 500):
            items = [scorable(str(i), answer=str(i - i % 2), tokens=i % 10 + 1) for i in range(count - 1)]
            items.append(scorable("no number", answer="no number"))
            scores = pool.score(items)
            exact = [float(i % 2 == 0) or 0.5 for i in range(count - 1)] + [0.0]
            length = [-(i % 10 + 1) / 10 for i in range(count - 1)] + [-0.1]
            second = [float(i % 2 == 0) for i in range(count - 1)] + [1.0]
            assert scores.by_name == {"exact": exact, "length": length, "exact_2": second}
            total = [a + 0.1 * b - c for a, b, c in zip(exact, length, second, strict=True)]
            assert scores.total == pytest.approx(total)
            assert scores.format_errors == [False] * (count - 1) + [True]
            assert not any(scores.errors) and not any(scores.timeouts) and not scores.messages


def test_no_responses_no_scores(patient):
    assert patient.score([]).total == []


def test_a_verifier_in_an_endless_loop_is_killed_and_counted_and_the_others_scored():
    rewards = [ExactMatchReward(), RegexReward(pattern=BACKTRACKING, timeout_s=0.3, on_error=-1)]
    with ScoringPool(rewards, num_workers=2) as pool:
        pool.score([scorable("warm")])
        before = worker_pids(pool)
        items = [scorable(ENDLESS if i in (3, 4, 17) else "aab", answer="aab") for i in range(20)]
        scores = pool.score(items)
        assert [i for i, late in enumerate(scores.timeouts) if late] == [3, 4, 17]
        assert scores.by_name["regex"] == [-1.0 if i in (3, 4, 17) else 1.0 for i in range(20)]
        assert scores.by_name["exact"] == [0.0 if i in (3, 4, 17) else 1.0 for i in range(20)]
        assert not any(scores.errors)
        assert scores.messages[0].startswith("reward regex, row ") and "limit of 0.3 s" in scores.messages[0]
        killed = set(before) - set(worker_pids(pool))
        assert killed
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in killed), "killed workers are reaped")


def test_exceptions_are_counted_and_named_and_score_as_configured():
    rewards = [NumericMatchReward(on_error=-0.5), ReasoningGymReward(on_error=0.25), ExactMatchReward()]
    with ScoringPool(rewards, num_workers=1) as pool:
        scores = pool.score([scorable("1", answer="one"), scorable("1", answer="1")])
    assert scores.by_name == {"numeric": [-0.5, 1.0], "reasoning_gym": [0.25, 0.25], "exact": [0.0, 1.0]}
    assert scores.outcomes["numeric"] == [Outcome.ERROR, Outcome.SCORED] and scores.errors == [True, True]
    assert any("row 0, prompt p: ValueError: the reference answer 'one' is no number" in m for m in scores.messages)
    assert any("KeyError: 'reasoning_gym'" in m for m in scores.messages)


def test_what_is_not_finite_is_an_error(monkeypatch):
    from engine.rewards.fork_server import evaluate
    from engine.rewards.outcome import Verdict

    assert evaluate(lambda case: Verdict(float("nan")), None)[0] is Outcome.ERROR
    assert evaluate(lambda case: Verdict(float("inf")), None)[0] is Outcome.ERROR
    assert evaluate(lambda case: sys.exit(0), None)[0] is Outcome.ERROR
    assert evaluate(lambda case: Verdict(0.5, True), None) == (Outcome.FORMAT_ERROR, 0.5, "")


def test_a_worker_that_dies_at_work_is_replaced_and_costs_one_sample(patient):
    items = [scorable("aab", answer="aab") for _ in range(30)]
    items[5] = scorable(ENDLESS)
    looping = threading.Event()

    def kill_the_busy_one():
        wait_until(lambda: any(_cpu_ticks(pid) > 20 for pid in worker_pids(patient)), "a worker gets busy")
        os.kill(max(worker_pids(patient), key=_cpu_ticks), signal.SIGKILL)
        looping.set()

    threading.Thread(target=kill_the_busy_one).start()
    scores = patient.score(items)
    assert looping.is_set()
    assert [i for i, error in enumerate(scores.errors) if error] == [5] and not any(scores.timeouts)
    assert scores.by_name["regex"][5] == -1 and sum(scores.by_name["regex"]) == 28
    assert "the scoring process died" in scores.messages[0]


def _cpu_ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def test_workers_killed_between_two_calls_cost_nothing(patient):
    for pid in worker_pids(patient):
        os.kill(pid, signal.SIGKILL)
    scores = patient.score([scorable("aab", answer="aab")] * 10)
    assert scores.total == [2.0] * 10 and not any(scores.errors)


def test_the_fork_server_itself_may_be_killed(patient):
    server = patient._server._process.pid
    os.kill(server, signal.SIGKILL)
    os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
    for _ in range(100):
        # Its workers live a moment longer and may answer.
        assert patient.score([scorable("aab", answer="aab")] * 10).total == [2.0] * 10
        if patient._server._process.pid != server:
            return
    pytest.fail("the dead server was never replaced")


def test_a_tower_of_powers_costs_math_verify_its_own_sample_only():
    with ScoringPool([MathVerifyReward(timeout_s=3, on_error=-1), ExactMatchReward()], num_workers=1) as pool:
        scores = pool.score([scorable("9^{9^{9^{9}}}", answer="1"), scorable("1", answer="1")])
    assert scores.by_name == {"math_verify": [-1.0, 1.0], "exact": [0.0, 1.0]}
    assert scores.timeouts == [True, False], "and it is a time-out, not a silent 0"


def test_math_verify_scores_right_when_called_from_a_thread():
    # verl#5635, TRL#5281: its SIGALRM needs a main thread; off it every score was silently 0.
    results = []
    with ScoringPool([MathVerifyReward()], num_workers=1) as pool:
        thread = threading.Thread(target=lambda: results.append(pool.score([scorable(r"$\frac12$", answer="0.5")])))
        thread.start()
        thread.join()
    assert results[0].total == [1.0] and not any(results[0].errors)


def test_code_is_scored_in_the_pool():
    items = [scorable("```\nx = 1\n```", tests=["assert x == 1", "assert x == 2"]), scorable("no code", tests=["1"])]
    with ScoringPool([CodeReward()], num_workers=1) as pool:
        scores = pool.score(items)
    assert scores.total == [0.5, 0.0] and scores.format_errors == [False, True]


def test_verifiers_see_no_secrets_and_load_no_torch(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "CANARY")
    with ScoringPool([ExactMatchReward()], num_workers=1) as pool:
        pool.score([scorable("a")])
        for pid in (pool._server._process.pid, *worker_pids(pool)):
            assert b"CANARY" not in Path(f"/proc/{pid}/environ").read_bytes()
            assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()


def test_closing_ends_every_process():
    pool = ScoringPool([ExactMatchReward()], num_workers=2)
    pool.score([scorable("a")])
    pids = [pool._server._process.pid, *worker_pids(pool)]
    pool.close()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "all scoring processes end")


def test_when_the_trainer_is_killed_no_scoring_process_stays_not_even_a_looping_one():
    program = textwrap.dedent(f"""
        from engine.rewards.pool import ScoringPool
        from engine.spec.reward import RegexReward
        from tests.engine.rewards.scoring import scorable
        pool = ScoringPool([RegexReward(pattern={BACKTRACKING!r}, timeout_s=600)], 2)
        while not all(worker.pid for worker in pool._workers()):
            pool.score([scorable("aab")])
        print(pool._server._process.pid, *(worker.pid for worker in pool._workers()), flush=True)
        pool.score([scorable({ENDLESS!r})] * 4)
    """)
    trainer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    with trainer:
        try:
            pids = [int(pid) for pid in trainer.stdout.readline().split()]
            wait_until(lambda: all(_cpu_ticks(pid) > 20 for pid in pids[1:]), "both workers loop")
        finally:
            trainer.kill()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "all scoring processes end")


def test_a_fork_server_that_cannot_start_is_a_fault_and_not_a_hang(monkeypatch):
    monkeypatch.setattr(workers.sys, "executable", "/bin/false")
    with pytest.raises(FaultError, match="scoring"), ScoringPool([ExactMatchReward()], num_workers=1) as pool:
        pool.score([scorable("a")])


def test_work_is_sent_in_chunks_that_every_worker_gets_some_of(patient):
    assert patient._chunk_size(1) == 1
    assert patient._chunk_size(64) == 16
    assert patient._chunk_size(10_000) == pool_module.MAX_CHUNK
