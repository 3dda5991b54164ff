"""`make setup`: builds once, notices changes and interruptions, takes turns, says in one sentence what is missing."""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.pipeline.repository.source_tree import ROOT

SCRIPT = ROOT / "requirements" / "environments.py"


def make_wheel(folder, name, version, files):
    """A wheel with these files, as pip installs it."""
    info = f"{name}-{version}.dist-info"
    contents = {**files, f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
                f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
    record = "".join(f"{path},,\n" for path in [*contents, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**contents, f"{info}/RECORD": record}.items():
            wheel.writestr(path, text)


@pytest.fixture(autouse=True, scope="module")
def only_local_wheels(tmp_path_factory):
    """pip reaches nothing but small wheels that the tests make; gives their folder."""
    wheels = tmp_path_factory.mktemp("wheels")
    for version in ("1.0", "2.0"):
        make_wheel(wheels, "oak", version, {"oak.py": f"version = '{version}'\n"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(wheels))
        patch.setenv("PIP_CONFIG_FILE", os.devnull)
        yield wheels


def new_checkout(folder):
    """Lock files that name one wheel; no environment yet."""
    (folder / "requirements").mkdir()
    for name in ("engine-cpu", "engine-gpu", "pipeline"):
        (folder / "requirements" / f"{name}.txt").write_text("oak==1.0\n    # via nothing\n")
    return folder


@pytest.fixture(scope="module")
def built_once(only_local_wheels, tmp_path_factory):
    """A checkout with both environments, and what building them printed."""
    checkout = new_checkout(tmp_path_factory.mktemp("checkout"))
    return checkout, setup(checkout)


@pytest.fixture
def checkout(built_once, tmp_path):
    """A copy of it: enough for python -m pip, and a tenth of the time of a new one."""
    return Path(shutil.copytree(built_once[0], tmp_path / "checkout", symlinks=True))


@pytest.fixture
def bare(tmp_path):
    """A checkout without environments."""
    return new_checkout(tmp_path)


def setup(checkout, *arguments, code=None):
    """Run the script; `code` runs first in its process, to break something."""
    program = [str(SCRIPT)] if code is None else ["-c", f"{code}\nsys.exit(environments.main(sys.argv[1:]))"]
    return subprocess.run(
        [sys.executable, *program, "--root", str(checkout), *arguments], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parent)})


def oak(checkout, environment):
    """The version that an environment imports."""
    done = subprocess.run([checkout / ".venv" / environment / "bin" / "python", "-c", "import oak; print(oak.version)"],
                          capture_output=True, text=True, check=True)
    return done.stdout.strip()


def assert_one_sentence(done, *words):
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr


def test_it_builds_both_and_then_does_nothing(built_once):
    checkout, first = built_once
    assert first.returncode == 0, first.stderr
    assert oak(checkout, "engine") == oak(checkout, "pipeline") == "1.0"
    assert all(line.startswith("setup: ") for line in (first.stdout + first.stderr).splitlines())
    lock, stamp = checkout / "requirements/engine-cpu.txt", checkout / ".venv/engine/.lock-sha256"
    assert stamp.read_text() == f"engine-cpu.txt {hashlib.sha256(lock.read_bytes()).hexdigest()}"
    again = setup(checkout)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")


def test_a_changed_lock_file_is_followed_in_place_also_by_two_at_once(checkout):
    kept = checkout / ".venv/engine/kept"
    kept.touch()
    (checkout / "requirements/engine-cpu.txt").write_text("oak==2.0\n")
    command = [sys.executable, str(SCRIPT), "--root", str(checkout)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(2)]
    output = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], output
    assert sorted(text.count(": ready") for text in output) == [0, 1], output
    assert oak(checkout, "engine") == "2.0" and kept.exists()
    assert oak(checkout, "pipeline") == "1.0"


@pytest.mark.slow
def test_an_interrupted_environment_is_built_anew_and_so_is_the_engine_when_its_lock_file_is_another(checkout):
    mine, theirs = checkout / ".venv/engine/leftover", checkout / ".venv/pipeline/leftover"
    mine.touch()
    theirs.touch()
    (checkout / ".venv/pipeline/.lock-sha256").write_text("incomplete")
    assert setup(checkout).returncode == 0
    assert not theirs.exists() and mine.exists() and oak(checkout, "pipeline") == "1.0"
    assert setup(checkout, "--engine", "gpu").returncode == 0
    assert not mine.exists() and oak(checkout, "engine") == "1.0", "files of the two engine locks never mix"


def test_a_build_that_dies_leaves_the_environment_marked(checkout):
    (checkout / "requirements/pipeline.txt").write_text("oak==2.0\n")
    dies = ("import sys, environments\n"
            "def pip_install(*args, **kwargs): raise KeyboardInterrupt\n"
            "environments.pip_install = pip_install")
    assert setup(checkout, code=dies).returncode != 0
    assert (checkout / ".venv/pipeline/.lock-sha256").read_text() == "incomplete"
    assert (checkout / ".venv/engine/.lock-sha256").read_text() != "incomplete"


def test_a_package_that_cannot_be_had_is_named(checkout):
    (checkout / "requirements/pipeline.txt").write_text("elm==3.1\n")
    assert_one_sentence(setup(checkout), "pipeline:", "elm==3.1", "PIP_FIND_LINKS", "make setup again")


def test_the_cuda_build_of_torch_is_refused_where_its_libraries_are_not_locked(checkout, only_local_wheels):
    make_wheel(only_local_wheels, "torch", "9.9", {
        "torch/__init__.py": "raise OSError('libcudart.so')\n",
        "torch/version.py": "__version__ = '9.9'\ncuda: str | None = '13.0'\n"})
    lock = checkout / "requirements/engine-cpu.txt"
    lock.write_text("torch==9.9\noak==1.0\n")
    assert_one_sentence(setup(checkout), "CUDA 13.0", "engine-cpu.txt", "PIP_FIND_LINKS", "ENGINE=gpu")
    assert (checkout / ".venv/engine/.lock-sha256").read_text() == "incomplete"


def test_the_cuda_build_of_torch_is_taken_where_its_libraries_are_locked(checkout, only_local_wheels):
    make_wheel(only_local_wheels, "torch", "9.8", {"torch/version.py": "cuda: str | None = '13.0'\n"})
    make_wheel(only_local_wheels, "nvidia_cublas", "1.0", {"nvidia/__init__.py": ""})
    (checkout / "requirements/engine-cpu.txt").write_text("torch==9.8\nnvidia-cublas==1.0\noak==1.0\n")
    assert setup(checkout).returncode == 0


def test_a_full_disk_is_noticed_before_anything_is_built(bare):
    code = ("import shutil, sys, environments\n"
            "shutil.disk_usage = lambda folder: shutil._ntuple_diskusage(10**10, 9 * 10**9, 10**9)")
    assert_one_sentence(setup(bare, code=code), "7 GB", "1.0 GB free")
    assert not (bare / ".venv/engine").exists()


def test_a_folder_that_cannot_be_written_is_named(bare):
    (bare / ".venv").write_text("in the way")
    assert_one_sentence(setup(bare), str(bare / ".venv"), "write permission")


def test_a_python_without_venv_names_debians_package(bare):
    code = "import sys\nsys.modules['ensurepip'] = None\nimport environments"
    assert_one_sentence(setup(bare, code=code), "python3.11-venv")


def test_when_one_environment_fails_the_others_pip_is_ended(checkout):
    (checkout / "requirements/engine-cpu.txt").write_text("oak==2.0\n")
    (checkout / "requirements/pipeline.txt").write_text("elm==3.1\n")
    # The engine's pip is replaced by a program that would run for ten minutes.
    python = checkout / ".venv/engine/bin/python"
    python.unlink()
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o755)
    assert_one_sentence(setup(checkout), "pipeline:", "elm==3.1")
    assert (checkout / ".venv/engine/.lock-sha256").read_text() == "incomplete"


@pytest.mark.parametrize(("log", "words"), [
    (["error: command 'gcc' failed: No such file or directory", "ERROR: Failed building wheel for elm"],
     ["C compiler", "build-essential"]),
    (["ERROR: Could not install packages: [Errno 28] No space left on device"], ["disk is full", "16 GB"]),
    (["ERROR: Something else"], ["exit code 1", "Something else"]),
    ([], ["exit code 1", "no output"]),
])
def test_pips_failures_are_translated(log, words, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import environments

    engine, _ = environments.environments(SCRIPT.parents[1], "gpu")
    sentence = environments.explain_pip(engine, 1, log)
    assert all(word in sentence for word in words) and "\n" not in sentence


def test_without_python_311_make_says_which_python_is_needed(tmp_path):
    for name in ("python3.11", "python3", "python"):
        fake = tmp_path / name
        fake.write_text("#!/bin/sh\nexit 1\n")
        fake.chmod(0o755)
    path = f"{tmp_path}:{Path('/usr/bin')}:{Path('/bin')}"
    done = subprocess.run(["make", "setup"], cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True,
                          check=False)
    assert done.returncode == 2
    assert "Python 3.11 is needed" in done.stderr.splitlines()[0]
