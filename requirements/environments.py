"""Builds .venv/engine and .venv/pipeline from their lock files; does nothing when they are up to date.

Standard library only: it runs before anything is installed. The stamp of an environment holds the hash of the lock file
it was built from and is written last, so an interrupted build is seen and started again. One build at a time.
"""

import argparse
import contextlib
import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INCOMPLETE = "incomplete"
# pip says these for every file of a folder it was told to look in; they are not about what is installed.
CHATTER = re.compile(r"WARNING: Location .* is ignored|Looking in (links|indexes)|\[notice\]")


class SetupError(Exception):
    """One sentence: what is missing and how to get it."""


@dataclass(frozen=True)
class Environment:
    """One virtual environment and the lock file it is built from."""

    name: str
    lock: Path
    venv: Path
    gigabytes: float
    """Space it takes, with what pip unpacks on the way."""

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.venv / "bin" / "python"

    @property
    def stamp(self) -> Path:
        """Holds the lock file's name and hash, or `incomplete`."""
        return self.venv / ".lock-sha256"

    def wanted(self) -> str:
        """What the stamp must say."""
        return f"{self.lock.name} {hashlib.sha256(self.lock.read_bytes()).hexdigest()}"

    def built(self) -> str:
        """What the stamp says; `incomplete` without one."""
        return self.stamp.read_text().strip() if self.stamp.exists() else INCOMPLETE

    def reusable(self) -> bool:
        """Built whole from an older state of the same lock file: pip can bring it up to date in place.

        Not so between the CPU and the GPU lock: both builds of vLLM own the same files.
        """
        return self.built().startswith(self.lock.name)


def environments(root: Path, engine: str) -> list[Environment]:
    """The two environments of a checkout; `engine` is `cpu` or `gpu`."""
    locks, venvs = root / "requirements", root / ".venv"
    return [
        Environment("engine", locks / f"engine-{engine}.txt", venvs / "engine", {"cpu": 5.0, "gpu": 16.0}[engine]),
        Environment("pipeline", locks / "pipeline.txt", venvs / "pipeline", 2.0),
    ]


def benchmark_environment(root: Path) -> Environment:
    """TRL, which benchmarks/iteration.py compares with."""
    return Environment("trl", root / "requirements" / "trl.txt", root / ".venv" / "trl", 3.0)


def build_missing(wanted: list[Environment]) -> None:
    """Build every environment whose stamp differs from its lock file, side by side.

    Raises:
        SetupError: no space, no permission, a package that cannot be had, or a torch that cannot be used here.
    """
    if all(environment.built() == environment.wanted() for environment in wanted):
        return
    folder = wanted[0].venv.parent
    with sole_builder(folder):
        stale = [environment for environment in wanted if environment.built() != environment.wanted()]
        if not stale:
            return  # the one that held the lock before built them
        require_space(folder, sum(e.gigabytes for e in stale if not e.reusable()))
        require_venv_module()
        with ThreadPoolExecutor(len(stale)) as pool, stop_pips_on_error():
            for done in as_completed([pool.submit(build, environment) for environment in stale]):
                done.result()


def build(environment: Environment) -> None:
    """Create the environment, or bring an existing one to its lock file; the stamp comes last."""
    lock, stamp = environment.lock, environment.wanted()
    if not environment.reusable():
        shutil.rmtree(environment.venv, ignore_errors=True)
        say(environment, f"new environment from {lock.relative_to(lock.parents[1])}")
        finished = subprocess.run(
            [sys.executable, "-m", "venv", str(environment.venv)], capture_output=True, text=True, check=False)
        if finished.returncode:
            what = last_line(finished.stdout + finished.stderr)
            raise SetupError(f"{environment.name}: python -m venv failed: {what}")
    environment.stamp.write_text(INCOMPLETE)
    if torch := pinned(lock, "torch"):
        pip_install(environment, [torch])
        require_usable_torch(environment)
    pip_install(environment, ["-r", str(lock)], count=len(pins(lock)))
    environment.stamp.write_text(stamp)
    say(environment, "ready")


def pip_install(environment: Environment, arguments: list[str], count: int = 0) -> None:
    """Run pip without dependency resolution: the lock file is complete."""
    command = [str(environment.python), "-m", "pip", "install", "--no-deps", "--no-input", "--progress-bar=off",
               "--disable-pip-version-check", *arguments]
    log, collected, started = [], 0, time.monotonic()
    if _STOPPING.is_set():
        raise SetupError(f"{environment.name}: stopped with the other environment")
    with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as pip:
        _RUNNING.append(pip)
        assert pip.stdout is not None
        for line in pip.stdout:
            if CHATTER.search(line):
                continue
            log.append(line.rstrip())
            collected += line.startswith("Collecting ")
            if count and line.startswith("Collecting ") and collected % 50 == 0:
                say(environment, f"fetched {collected} of {count} packages, {time.monotonic() - started:.0f} s")
            if count and line.startswith("Installing collected packages"):
                say(environment, f"unpacking {count} packages, a few minutes")
    if pip.returncode:
        raise SetupError(explain_pip(environment, pip.returncode, log))


_RUNNING: list[subprocess.Popen] = []
_STOPPING = threading.Event()


@contextlib.contextmanager
def stop_pips_on_error() -> Iterator[None]:
    """When one build fails or Ctrl-C arrives, the other one's pip ends too."""
    try:
        yield
    except BaseException:
        _STOPPING.set()
        for pip in _RUNNING:
            pip.terminate()
        raise


def explain_pip(environment: Environment, code: int, log: list[str]) -> str:
    """One sentence for what made pip fail."""
    name, text = environment.name, "\n".join(log)
    if "No space left on device" in text:
        return (f"{name}: the disk is full; this environment takes about {environment.gigabytes:.0f} GB (pip also "
                f"unpacks in {tempfile.gettempdir()}); free as much and run make setup again")
    if re.search(r"(gcc|cc|g\+\+)['\"]?.*(No such file|not found)|command '.*(gcc|cc)' failed", text):
        return f"{name}: a package must be compiled and there is no C compiler; install one (Debian: build-essential)"
    errors = [line for line in log if line.startswith("ERROR")] or log[-1:]
    if re.search(r"Could not find a version|No matching distribution", text):
        package = errors[0].split("requirement ")[-1].split(" (from")[0] if errors else "a package"
        return (f"{name}: pip finds no {package} for this machine; check the network and pip's settings "
                f"(PIP_INDEX_URL, PIP_FIND_LINKS) and run make setup again")
    return f"{name}: pip ended with exit code {code}: {errors[0] if errors else 'no output'}"


def require_usable_torch(environment: Environment) -> None:
    """Refuse a CUDA build of torch whose libraries the lock file leaves out, before gigabytes more are fetched.

    Raises:
        SetupError: it would fail at `import torch`.
    """
    versions = list(environment.venv.glob("lib/python*/site-packages/torch/version.py"))
    cuda = re.search(r"^cuda\b.*= '([^']+)'", versions[0].read_text(), re.MULTILINE) if versions else None
    if cuda and not any(name.startswith("nvidia-") for name in pins(environment.lock)):
        raise SetupError(
            f"engine: pip took the CUDA {cuda[1]} build of torch, whose libraries {environment.lock.name} leaves out; "
            f"give pip a folder or an index with torch's CPU build (PIP_FIND_LINKS=... or PIP_EXTRA_INDEX_URL=...) and "
            f"run make setup again, or run make setup ENGINE=gpu")


def require_space(folder: Path, gigabytes: float) -> None:
    """Refuse to start a build that would fill the disk."""
    free = shutil.disk_usage(folder).free / 1e9
    if free < gigabytes:
        raise SetupError(
            f"{folder} needs about {gigabytes:.0f} GB and its disk has {free:.1f} GB free; free some space")


def require_venv_module() -> None:
    """Debian ships Python without ensurepip; say which package has it."""
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        raise SetupError(f"{sys.executable} cannot make virtual environments (no ensurepip); install the rest of it "
                         f"(Debian: python3.11-venv)") from None


@contextlib.contextmanager
def sole_builder(folder: Path) -> Iterator[None]:
    """Hold the checkout's build lock; wait for another `make setup` to finish first."""
    try:
        folder.mkdir(exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise SetupError(f"cannot write to {folder}: {error.strerror}; environments are built there, so give this user "
                         f"write permission or clone elsewhere") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("setup: waiting for another make setup in this checkout", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def pins(lock: Path) -> dict[str, str]:
    """Package name -> exact version of a lock file."""
    lines = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", lock.read_text(), re.MULTILINE)
    return {name.lower(): version for name, version in lines}


def pinned(lock: Path, name: str) -> str | None:
    """`name==version` when the lock file has it."""
    version = pins(lock).get(name)
    return f"{name}=={version}" if version else None


def last_line(text: str) -> str:
    """The last line with something in it."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no output")


_PRINTING = threading.Lock()


def say(environment: Environment, text: str) -> None:
    """Print one line of progress."""
    with _PRINTING:
        print(f"setup: {environment.name}: {text}", flush=True)


def main(arguments: list[str]) -> int:
    """Build what is missing; 0 done, 2 something a person must mend, 130 interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--benchmark", action="store_true", help="build the environment of TRL instead")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        if options.benchmark:
            build_missing([benchmark_environment(options.root)])
        else:
            build_missing(environments(options.root, options.engine))
    except (SetupError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except KeyboardInterrupt:
        print("\nsetup: interrupted; the next make setup starts the unfinished environment again", file=sys.stderr)
        code = 130
    sys.exit(code)
