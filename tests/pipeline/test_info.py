"""`python -m engine info` where the engine's packages are missing: reported, not raised."""

import json
import subprocess
import sys


def info(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "engine", "info", *arguments], capture_output=True, text=True, check=False)


def test_missing_engine_packages_are_listed_with_the_way_to_get_them():
    done = info()
    assert done.returncode == 2 and done.stderr == ""
    missing = [line for line in done.stdout.splitlines() if line.startswith("missing: ")]
    assert len(missing) == 1
    assert all(name in missing[0] for name in ("torch", "megatron-core", "vllm", "make setup"))


def test_the_json_form_says_the_same_to_programs():
    done = info("--json")
    found = json.loads(done.stdout)
    assert done.returncode == 2
    assert {p["module"]: p["version"] for p in found["packages"]}["torch"] is None
    assert found["communication"] == [] and len(found["missing"]) == 1
    assert [device["kind"] for device in found["devices"]] == ["cpu"]
