import os
import time

import pytest

from engine.rewards import sandbox
from engine.rewards.outcome import Verdict
from engine.rewards.sandbox import passes
from engine.spec.reward import CodeReward
from tests.engine.rewards.scoring import verdict

REWARD = CodeReward(test_timeout_s=10)


def refused(action: str) -> str:
    """A program that ends well only if `action` is refused."""
    return (f"import os, socket, subprocess\ntry:\n    {action}\nexcept PermissionError:\n    pass\n"
            f"else:\n    raise SystemExit\n")


@pytest.mark.parametrize("program", [
    "assert 1 + 1 == 2",
    "import json, math, re, collections, itertools, datetime, decimal, hashlib, heapq, typing, dataclasses, random",
    "import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()",
    "print('x' * 1_000_000)",
    "assert 'ü' == '\\xfc'",
])
def test_programs_that_only_compute_come_to_their_end(program):
    assert passes(program, REWARD)


@pytest.mark.parametrize("program", [
    "assert False", "1 / 0", "syntax error", "import sys; sys.exit(0)", "import os; os._exit(0)",
    "raise KeyboardInterrupt", "import os; os.close(3); os.close(4)\nassert 0", "bytearray(1 << 30)",
    "import numpy", "def f(): f()\nf()",
])
def test_programs_that_fail_or_leave_early_have_not_passed(program):
    assert not passes(program, REWARD)


@pytest.mark.parametrize("action", [
    "open('/etc/passwd')", "os.listdir('/')", "os.listdir(os.path.expanduser('~root'))", "open('/proc/self/environ')",
    "open('/proc/%d/environ' % os.getppid())", "open('/tmp/written', 'w')", "os.mkdir('/tmp/made')",
    "socket.socket()", "socket.socket(socket.AF_UNIX)", "socket.create_connection(('1.1.1.1', 53))",
    "os.fork()", "subprocess.run(['/bin/true'])", "os.execv('/bin/true', ['true'])", "os.kill(os.getppid(), 0)",
])
def test_everything_but_computing_is_refused(action):
    assert passes(refused(action), REWARD)


def test_the_environment_is_empty(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "CANARY")
    program = "import os\nassert not any('CANARY' in v for v in os.environ.values())\nassert len(os.environ) < 2"
    assert passes(program, REWARD)


@pytest.mark.parametrize("program", [
    "while True: pass", "import time; time.sleep(100)", "while True: print('x' * 100000)"])
def test_a_program_without_end_is_ended_at_its_limit(program):
    started = time.monotonic()
    assert not passes(program, CodeReward(test_timeout_s=0.5))
    assert time.monotonic() - started < 30, "its own limit, not somebody's patience"


def test_nothing_is_run_where_it_cannot_be_confined(monkeypatch, tmp_path):
    child = tmp_path / "child.py"
    text = open(sandbox.sandbox_child.__file__).read()
    child.write_text(text.replace("LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446",
                                  "LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 9999, 445, 446"))
    monkeypatch.setattr(sandbox.sandbox_child, "__file__", str(child))
    with pytest.raises(RuntimeError, match="Landlock.*Linux 5.13"):
        passes("pass", REWARD)


def test_the_score_is_the_share_of_tests_or_all_of_them():
    response = "Here it is:\n```python\ndef double(x):\n    return x + x\n```\nDone."
    tests = ["assert double(2) == 4", "assert double('a') == 'aa'", "assert double(2) == 5", "double()"]
    assert verdict(CodeReward(), response, tests=tests) == Verdict(0.5)
    assert verdict(CodeReward(all_or_nothing=True), response, tests=tests) == Verdict(0.0)
    assert verdict(CodeReward(all_or_nothing=True), response, tests=tests[:2]) == Verdict(1.0)
    assert verdict(CodeReward(), "no code", tests=tests) == Verdict(0.0, format_error=True)


def test_a_row_without_tests_is_an_error():
    with pytest.raises(ValueError, match="no list `tests`"):
        verdict(CodeReward(), "```\npass\n```", tests=[])
    with pytest.raises(KeyError, match="tests"):
        verdict(CodeReward(), "```\npass\n```")


def test_no_descriptors_are_left_behind():
    before = set(os.listdir("/proc/self/fd"))
    for program in ("pass", "assert 0"):
        passes(program, REWARD)
    # Others may close theirs meanwhile. One more is the listing's own.
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 1
