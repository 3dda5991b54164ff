"""The images' Dockerfiles: linted, reproducible, not run as root, from the lock files; their install steps work."""

import fnmatch
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipeline.docker.dockerfiles import FOLDER, ROOT, expand, instructions, stages

IMAGES = {"pipeline.Dockerfile": [{}], "engine.Dockerfile": [{"ENGINE": "gpu"}, {"ENGINE": "cpu"}]}
CASES = [(name, arguments) for name, variants in IMAGES.items() for arguments in variants]


def ignored(path):
    """Whether .dockerignore keeps a path of the repository out of the build context; the last matching line decides."""
    verdict = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!")
        parts = path.split("/")
        heads = ["/".join(parts[: i + 1]) for i in range(len(parts))]
        if any(fnmatch.fnmatch(head, pattern) for head in heads):
            verdict = not line.startswith("!")
    return verdict


def test_all_dockerfiles_are_tested():
    assert set(IMAGES) == {path.name for path in FOLDER.glob("*Dockerfile")}


@pytest.mark.parametrize("name", IMAGES)
def test_hadolint_finds_nothing(name):
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, FOLDER / name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", IMAGES)
def test_bases_are_pinned_to_the_python_that_the_lock_files_are_for(name):
    bases = [arguments.split(" ")[0] for word, arguments in instructions(name) if word == "FROM"]
    assert all(re.fullmatch(r"python:3\.11\.\d+-slim-bookworm", base) for base in bases)
    assert len(set(bases)) == 1, "an environment is copied between stages: they need the same interpreter"


@pytest.mark.parametrize("name", IMAGES)
def test_nothing_runs_as_root_and_no_secret_is_baked_in(name):
    final = stages(name)[-1]
    user = [arguments for word, arguments in final if word == "USER"][-1]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user) and f"--uid {user.split(':')[0]} " in str(final)
    assert final.index(("USER", user)) > max(i for i, (word, _) in enumerate(final) if word in ("RUN", "COPY"))
    settings = " ".join(arguments for word, arguments in instructions(name) if word in ("ENV", "ARG"))
    assert not re.search(r"PASSWORD|SECRET|TOKEN|ACCESS_KEY|FERNET", settings, re.IGNORECASE)
    assert not [arguments for word, arguments in instructions(name) if word == "ADD"]


@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_what_is_copied_exists_and_is_in_the_build_context(name, arguments):
    for word, operands in instructions(name):
        if word == "COPY" and not operands.startswith("--from="):
            *sources, _ = expand(operands, arguments).split(" ")
            for source in sources:
                assert (ROOT / source).exists(), source
                probe = f"{source}/__init__.py" if (ROOT / source).is_dir() else source
                assert not ignored(probe), f".dockerignore leaves out {source}"


def test_the_build_context_holds_no_environment_no_state_and_no_secret():
    for path in (".venv/engine/bin/python", ".ratchet/airflow.db", "docker/.env", ".git/config", "tests/run.sh"):
        assert ignored(path), path


@pytest.mark.parametrize("name", IMAGES)
def test_paths_that_the_image_sets_are_made_in_it(name):
    final = stages(name)[-1]
    made = " ".join(arguments for word, arguments in final if word in ("COPY", "RUN"))
    for setting in re.findall(r"=(/[\w/.-]+)", " ".join(a for word, a in final if word == "ENV")):
        assert any(setting == place or setting.startswith(place.rstrip("/") + "/") or place.startswith(setting + "/")
                   for place in re.findall(r"(?<= )/[\w/.-]+", made)), setting


def install_steps(name, arguments):
    """The RUN lines that make environments."""
    steps = [expand(operands, arguments) for word, operands in stages(name)[0] if word == "RUN"]
    assert all("--no-deps -r" in step and "python -m venv" in step for step in steps)
    return steps


@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_an_environment_is_made_by_the_same_step_in_every_image(name, arguments):
    steps = {step.split(" ")[3]: step for step in install_steps(name, arguments)}
    assert steps["/opt/venv/pipeline"] == install_steps("pipeline.Dockerfile", {})[0]
    assert f"engine-{arguments['ENGINE']}.txt" in steps["/opt/venv/engine"] if arguments else len(steps) == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("step", install_steps("engine.Dockerfile", {"ENGINE": "cpu"}), ids=["pipeline", "engine-cpu"])
def test_the_install_steps_resolve_in_a_fresh_environment(step, tmp_path):
    """Run as they are but for --dry-run: pip finds every pinned file for this Python and would install it."""
    here = (step.replace("/opt/venv", str(tmp_path)).replace("/requirements/", f"{ROOT}/requirements/")
            .replace("python -m venv", f"{sys.executable} -m venv")
            .replace("--no-cache-dir", "--dry-run --quiet --report -"))
    done = subprocess.run(["sh", "-ec", here], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lock = Path(re.search(r"-r \"?([^\"\s]+)", here)[1])
    assert done.stdout.count('"download_info"') == len(re.findall(r"^[\w.-]+==", lock.read_text(), re.MULTILINE))
