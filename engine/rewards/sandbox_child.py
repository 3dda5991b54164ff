"""Runs one untrusted Python program in this process, after giving up everything but computing. Standard library only.

    python -I -S sandbox_child.py MEMORY_BYTES CPU_SECONDS REPORT_FD < program

The input begins with a nonce; it is written to REPORT_FD when the program has run to its end. A program that exits
early, with whatever exit code, has not passed. That is as far as it goes: a program shares the interpreter with its
tests, so one that sets its mind on it can make them pass, for example by answers that are equal to everything.

What is given up, for good and before the program is read: files (Landlock: only Python's own library can be read,
nothing can be written), every system call that could change something outside the process: files' attributes, network,
other processes, starting processes, signals (seccomp), memory and CPU (rlimits).
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

LOAD, JUMP_EQUAL, JUMP_GREATER_EQUAL, JUMP_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, REFUSE, UNKNOWN = 0x7FFF0000, 0x80000000, 0x00050000 | 1, 0x00050000 | 38
"""REFUSE and UNKNOWN: the call fails with EPERM, ENOSYS."""
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOWED = {
    # read write close fstat stat lstat newfstatat statx lseek mmap mprotect munmap mremap madvise brk pread64 readv
    # writev access faccessat readlink readlinkat getcwd getdents64 chdir dup dup2 dup3 pipe pipe2 poll ppoll select
    # pselect6 epoll_create1 epoll_ctl epoll_wait epoll_pwait eventfd2 sendto recvfrom shutdown rt_sigaction
    # rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait rt_sigsuspend sigaltstack pause alarm setitimer
    # getitimer restart_syscall nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time times getrusage
    # getrlimit sysinfo uname getpid gettid getppid getuid geteuid getgid getegid getgroups getresuid getresgid
    # sched_yield sched_getaffinity getcpu getrandom futex set_robust_list set_tid_address rseq membarrier arch_prctl
    # exit exit_group
    "x86_64": (
        0, 1, 3, 5, 4, 6, 262, 332, 8, 9, 10, 11, 25, 28, 12, 17, 19, 20, 21, 269, 89, 267, 79, 217, 80, 32, 33,
        292, 22, 293, 7, 271, 23, 270, 291, 233, 232, 281, 290, 44, 45, 48, 13, 14, 15, 127, 128, 130, 131, 34, 37,
        38, 36, 219, 35, 230, 228, 229, 96, 201, 100, 98, 97, 99, 63, 39, 186, 110, 102, 107, 104, 108, 115, 118,
        120, 24, 204, 309, 318, 202, 273, 218, 334, 324, 158, 60, 231),
    "aarch64": (
        63, 64, 57, 80, 79, 291, 62, 222, 226, 215, 216, 233, 214, 67, 65, 66, 48, 78, 17, 61, 49, 23, 24, 59, 73,
        72, 20, 21, 22, 19, 206, 207, 210, 134, 135, 139, 136, 137, 133, 132, 103, 102, 128, 101, 115, 113, 114,
        169, 153, 165, 163, 179, 160, 172, 178, 173, 174, 175, 176, 177, 158, 148, 150, 124, 123, 168, 278, 98, 99,
        96, 293, 283, 93, 94),
}
"""Calls that change nothing outside the process, by number."""

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
CLONE_THREAD = 0x00010000
LIMITED = (
    # open and openat, not to write: Landlock before version 3 lets O_TRUNC through
    ((2, None), 1, JUMP_BITS, (WRITING,), REFUSE),
    ((257, 56), 2, JUMP_BITS, (WRITING,), REFUSE),
    # socketpair, of streams: a datagram could be sent to any socket in the file system
    ((53, 199), 1, JUMP_BITS, (0xE,), REFUSE),
    # fcntl: F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC; others make the kernel send signals
    ((72, 25), 1, JUMP_EQUAL, (0, 1, 2, 3, 4, 1030), ALLOW),
    # ioctl: TCGETS, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX; others change the attributes of files
    ((16, 29), 1, JUMP_EQUAL, (0x5401, 0x541B, 0x5421, 0x5450, 0x5451), ALLOW),
    # prlimit64, of this process
    ((302, 261), 0, JUMP_EQUAL, (0,), ALLOW),
    # clone, of threads; the C library falls back to it from `clone3`, whose flags a filter cannot see
    ((56, 220), 0, JUMP_BITS, (CLONE_THREAD,), ALLOW),
)
"""Calls by number (x86_64, aarch64), the argument looked at, how it is compared, with what, and what a match means."""
NEW_CALLS = 424
"""From here on numbers are the same everywhere; the C library does without these calls where the kernel has none."""
NUMBER_OFFSET, ARCHITECTURE_OFFSET, FIRST_ARGUMENT_OFFSET = 0, 4, 16
X32_BIT = 0x40000000

NONCE_BYTES = 32
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
    """From here on nothing outside the process can be changed: no network, no processes, no signals, no attributes."""
    machine = platform.machine()
    if machine not in ALLOWED:
        refuse(f"no list of system calls for {machine}")
    program = [
        (LOAD, 0, 0, ARCHITECTURE_OFFSET), (JUMP_EQUAL, 1, 0, ARCHITECTURE[machine]), (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_OFFSET), (JUMP_GREATER_EQUAL, 0, 1, X32_BIT), (RETURN, 0, 0, KILL)]
    for number in ALLOWED[machine]:
        program += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    for numbers, argument, compare, constants, match in LIMITED:
        number = numbers[machine == "aarch64"]
        if number is not None:
            test = [(LOAD, 0, 0, FIRST_ARGUMENT_OFFSET + 8 * argument)]
            for constant in constants:
                test += [(compare, 0, 1, constant), (RETURN, 0, 0, match)]
            test.append((RETURN, 0, 0, ALLOW if match == REFUSE else REFUSE))
            program += [(JUMP_EQUAL, 0, len(test), number), *test]
    program += [(JUMP_GREATER_EQUAL, 0, 1, NEW_CALLS), (RETURN, 0, 0, UNKNOWN), (RETURN, 0, 0, REFUSE)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in program))
    filter_ = struct.pack("<HxxxxxxQ", len(program), ctypes.addressof(code))
    check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filter_, 0, 0), "seccomp")


def run_program() -> bytes:
    """Run what is left on standard input."""
    exec(compile(sys.stdin.buffer.read().decode(), "answer.py", "exec"), {"__name__": "__main__"})  # noqa: S102
    return b""


def main() -> None:
    """Give up what is listed above, then run the program."""
    memory_bytes, cpu_seconds, report = map(int, sys.argv[1:])
    check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "parent's death")
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    limit_resources(memory_bytes, cpu_seconds)
    restrict_files()
    restrict_calls()
    # Meanwhile the nonce is on the interpreter's stack alone: no variable, frame or container leads the program to it.
    os.write(report, b"".join([os.read(0, NONCE_BYTES), run_program()]))


if __name__ == "__main__":
    main()
