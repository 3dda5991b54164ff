"""Runs one untrusted Python program in this process, after giving up everything but computing. Standard library only.

    python -I -S sandbox_child.py MEMORY_BYTES CPU_SECONDS REPORT_FD < program

The first line of the input is a nonce; it is written to REPORT_FD when the program has run to its end. A program that
exits early, with whatever exit code, has not passed.

What is given up, for good and before the program is read: files (Landlock: only Python's own library can be read,
nothing can be written), network, other processes, starting processes, signals (seccomp), memory and CPU (rlimits).
Where the kernel has neither Landlock nor seccomp nothing is run: Linux 5.13 or later, x86_64 or aarch64.
"""

import ctypes
import os
import platform
import resource
import signal
import struct
import sys
import sysconfig
from typing import NoReturn

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 1, 38, 22, 2
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
RULE_PATH_BENEATH = 1
READ_FILE_AND_DIR = 1 << 2 | 1 << 3
ACCESS_BITS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Kinds of file access that each version of Landlock can forbid."""

CLONE_THREAD = 0x00010000
DENIED = {
    # socket, connect, bind; execve, execveat, fork, vfork; kill, tkill, tgkill; ptrace, process_vm_readv/writev;
    # unshare, setns, mount, bpf, io_uring_setup; pidfd_open, pidfd_send_signal, pidfd_getfd; keyctl
    "x86_64": (41, 42, 49, 59, 322, 57, 58, 62, 200, 234, 101, 310, 311, 272, 308, 165, 321, 425, 434, 424, 438, 250),
    "aarch64": (198, 203, 200, 221, 281, 129, 130, 131, 117, 270, 271, 97, 268, 40, 280, 425, 434, 424, 438, 219),
}
CLONE3 = 435
ARCHITECTURE = {"x86_64": (0xC000003E, 56), "aarch64": (0xC00000B7, 220)}
"""The kernel's name of the machine, and the number of `clone`."""
LOAD, JUMP_EQUAL, JUMP_GREATER_EQUAL, JUMP_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER_OFFSET, ARCHITECTURE_OFFSET, FIRST_ARGUMENT_OFFSET = 0, 4, 16
ALLOW, KILL, REFUSE, UNKNOWN = 0x7FFF0000, 0x80000000, 0x00050000 | 1, 0x00050000 | 38
"""REFUSE and UNKNOWN: the call fails with EPERM, ENOSYS."""
X32_BIT = 0x40000000

REFUSAL = "sandbox:"
libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> int:
    """`result` of a system call; the end when it failed."""
    if result < 0:
        refuse(f"{what}: {os.strerror(ctypes.get_errno())}; it needs Linux 5.13 with Landlock and seccomp")
    return result


def refuse(reason: str) -> NoReturn:
    """End without having run anything."""
    os.write(int(sys.argv[3]), f"{REFUSAL} {reason}".encode())
    sys.exit(1)


def limit_resources(memory_bytes: int, cpu_seconds: int) -> None:
    """Memory, CPU, open files, and no files written or dumped."""
    for what, limit in ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_CPU, cpu_seconds),
                        (resource.RLIMIT_NOFILE, 32), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(what, (limit, limit))


def restrict_files() -> None:
    """From here on only Python's library and shared objects can be read."""
    version = check(libc.syscall(LANDLOCK_CREATE, None, 0, 1), "Landlock")
    handled = (1 << ACCESS_BITS.get(version, 16)) - 1
    attributes = struct.pack("<Q", handled)
    ruleset = check(libc.syscall(LANDLOCK_CREATE, attributes, len(attributes), 0), "Landlock ruleset")
    for path in (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), "/lib", "/lib64", "/usr/lib"):
        if os.path.isdir(path):
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = struct.pack("<Qi", READ_FILE_AND_DIR, descriptor)
            check(libc.syscall(LANDLOCK_ADD, ruleset, RULE_PATH_BENEATH, rule, 0), f"Landlock rule for {path}")
            os.close(descriptor)
    check(libc.syscall(LANDLOCK_RESTRICT, ruleset, 0), "Landlock restriction")
    os.close(ruleset)


def restrict_calls() -> None:
    """From here on no network, no processes, no signals."""
    machine = platform.machine()
    if machine not in DENIED:
        refuse(f"no list of system calls for {machine}")
    architecture, clone = ARCHITECTURE[machine]
    program = [
        (LOAD, 0, 0, ARCHITECTURE_OFFSET), (JUMP_EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_OFFSET), (JUMP_GREATER_EQUAL, 0, 1, X32_BIT), (RETURN, 0, 0, KILL)]
    for number in DENIED[machine]:
        program += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE)]
    # The C library falls back from `clone3`, whose flags a filter cannot see, to `clone`, which makes threads (fine)
    # and processes (not).
    program += [(JUMP_EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, UNKNOWN)]
    program += [(JUMP_EQUAL, 0, 3, clone), (LOAD, 0, 0, FIRST_ARGUMENT_OFFSET), (JUMP_BITS, 1, 0, CLONE_THREAD),
                (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in program))
    filter_ = struct.pack("<HxxxxxxQ", len(program), ctypes.addressof(code))
    check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filter_, 0, 0), "seccomp")


def main() -> None:
    """Give up what is listed above, then run the program."""
    memory_bytes, cpu_seconds, report = map(int, sys.argv[1:])
    check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "parent's death")
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    nonce, _, program = sys.stdin.buffer.read().decode().partition("\n")
    limit_resources(memory_bytes, cpu_seconds)
    restrict_files()
    restrict_calls()
    exec(compile(program, "answer.py", "exec"), {"__name__": "__main__"})  # noqa: S102
    os.write(report, nonce.encode())


if __name__ == "__main__":
    main()
