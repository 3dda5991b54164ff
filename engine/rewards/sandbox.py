"""Code in responses, run against the row's unit tests, each in a process that can do nothing but compute."""

import contextlib
import math
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Callable

from engine.rewards import sandbox_child
from engine.rewards.outcome import Case, Verdict
from engine.spec.reward import CodeReward


def code_function(reward: CodeReward) -> Callable[[Case], Verdict]:
    """The scoring function of a code reward; see `CodeReward` for what a row must hold."""
    pattern = re.compile(reward.pattern)

    def score(case: Case) -> Verdict:
        match = pattern.fullmatch(case.response)
        if match is None:
            return Verdict(0.0, format_error=True)
        tests = case.metadata["tests"]
        if not isinstance(tests, list) or not tests:
            raise ValueError("the row's metadata has no list `tests`")
        code = match[1] if pattern.groups else match[0]
        passed = sum(passes(f"{code}\n{test}\n", reward) for test in tests)
        return Verdict(float(passed == len(tests)) if reward.all_or_nothing else passed / len(tests))

    return score


def passes(program: str, reward: CodeReward) -> bool:
    """Run a program in the sandbox; whether it came to its end.

    Raises:
        RuntimeError: this machine cannot confine it; nothing was run.
    """
    nonce = secrets.token_hex(sandbox_child.NONCE_BYTES // 2)
    readable, writable = os.pipe()
    try:
        # No environment, no inherited files but the report's end of the pipe; isolated mode ignores user settings.
        command = [sys.executable, "-I", "-S", sandbox_child.__file__, str(reward.memory_bytes),
                   str(math.ceil(reward.test_timeout_s)), str(writable)]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                command, input=f"{nonce}{program}".encode(errors="replace"), stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, pass_fds=[writable], env={}, cwd="/", timeout=reward.test_timeout_s)
        os.write(writable, b"\n")
        report = os.read(readable, 1000).decode(errors="replace").strip()
    finally:
        os.close(readable)
        os.close(writable)
    if report.startswith(sandbox_child.REFUSAL):
        raise RuntimeError(report)
    return report == nonce
