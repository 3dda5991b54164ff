import os
import resource
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
    "import asyncio\nasync def main(): await asyncio.sleep(0)\nasyncio.run(main())",
    "import signal, time\nsignal.signal(signal.SIGALRM, lambda *_: None)\nsignal.alarm(5)\ntime.sleep(0.01)",
    "import socket\na, b = socket.socketpair()\na.settimeout(5)\na.send(b'x')\nassert b.recv(1) == b'x'",
    "from concurrent.futures import ThreadPoolExecutor as Pool\nassert sum(Pool(2).map(abs, (1, -1))) == 2",
    "import glob, io, os, re, sys, time, uuid, secrets, sqlite3, inspect, contextlib, platform, unittest, fractions\n"
    "uuid.uuid4(), secrets.token_hex(), time.time(), os.cpu_count(), sys.stdin.read(), platform.node(), os.getcwd()\n"
    "assert sqlite3.connect(':memory:').execute('select 2').fetchone() == (2,) and inspect.getsource(re.compile)",
    "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(1, 1)\n"
    "assert unittest.main(argv=['x'], exit=False).result.wasSuccessful()",
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


CHILD = """
import ctypes, fcntl, os, resource, signal, socket
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *args):
    if getattr(libc, name)(*args) < 0: raise OSError(ctypes.get_errno(), name)
owner = os.getppid()
try:
    {action}
except OSError as error:
    assert error.errno in (1, 38), error
else:
    raise SystemExit
"""


@pytest.mark.parametrize("action", [
    "os.chmod(PATH, 0o666)", "os.chmod(PATH, 0o666, follow_symlinks=False)", "os.chown(PATH, -1, -1)",
    "os.lchown(PATH, -1, -1)", "os.fchmod(0, 0o666)", "os.fchown(0, -1, -1)", "os.utime(PATH, (0, 0))",
    "os.utime(0, (0, 0))", "os.setxattr(PATH, 'user.a', b'')", "os.removexattr(PATH, 'user.a')",
    "os.truncate(PATH, 0)", "os.open(PATH, os.O_RDONLY | os.O_TRUNC)", "os.open(PATH, os.O_RDWR)",
    "resource.prlimit(owner, resource.RLIMIT_NOFILE, (9, 9))", "resource.prlimit(owner, resource.RLIMIT_NOFILE)",
    "os.sched_setaffinity(owner, {0})", "os.sched_setscheduler(owner, os.SCHED_BATCH, os.sched_param(0))",
    "os.sched_setparam(owner, os.sched_param(0))", "os.setpriority(os.PRIO_PROCESS, owner, 19)", "os.nice(1)",
    "call('sigqueue', owner, 0, None)", "call('process_vm_readv', owner, None, 0, None, 0, 0)",
    "call('ptrace', 16, owner, None, None)", "signal.pidfd_send_signal(0, 0)", "os.pidfd_open(owner)",
    "call('syscall', 251, 1, owner, 0)", "call('syscall', 312, owner, owner, 0, 0, 0)",
    "call('shmget', 0, 4096, 0o1600)", "os.setsid()", "os.setpgid(0, 0)", "os.memfd_create('x')",
    "fcntl.fcntl(0, fcntl.F_SETOWN, owner)", "fcntl.fcntl(0, fcntl.F_SETSIG, 9)",
    "fcntl.ioctl(os.open(os.__file__, os.O_RDONLY), 0x40086602, b'\\0' * 8)",
    "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)", "os.rename(PATH, PATH + '2')", "os.unlink(PATH)",
    "os.symlink('a', PATH + '2')", "os.link(PATH, PATH + '2')", "call('prctl', 1, 0, 0, 0, 0)",
])
def test_no_call_reaches_files_or_processes_outside(action, tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    file.chmod(0o600)
    file.touch()
    before, limit = file.stat(), resource.getrlimit(resource.RLIMIT_NOFILE)
    assert passes(CHILD.replace("{action}", action).replace("PATH", repr(str(file))), REWARD)
    assert file.stat() == before and resource.getrlimit(resource.RLIMIT_NOFILE) == limit


FORGERY = """
import gc, os, sys
seen, texts, queue = set(), [], [*sys._current_frames().values(), sys._getframe(), *gc.get_objects()]
while queue:
    found = queue.pop()
    if id(found) in seen: continue
    seen.add(id(found))
    if isinstance(found, (str, bytes)):
        texts.append(found)
        continue
    queue += gc.get_referents(found)
    if type(found) is type(sys._getframe()):
        queue += [*found.f_locals.values(), found.f_back]
texts = {text if isinstance(text, str) else text.decode(errors='replace') for text in texts}
for text in texts:
    if len(text) == 32 and text.startswith('decade'):
        for descriptor in range(3, 32):
            try: os.write(descriptor, text.encode())
            except OSError: pass
os._exit(0)
"""


def test_a_program_that_looks_through_all_objects_does_not_find_the_nonce(monkeypatch):
    monkeypatch.setattr(sandbox.secrets, "token_hex", lambda num_bytes: "decade" + os.urandom(num_bytes - 3).hex())
    assert not passes(FORGERY, CodeReward(test_timeout_s=20, memory_bytes=1 << 30))


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
