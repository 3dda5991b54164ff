"""The rules of docs/style.md and docs/design.md that a machine can hold."""

import ast
import re
import subprocess
import sys

import pytest

from tests.pipeline.repository.source_tree import ROOT, files, imports, python_files, within

SOURCES = ["dags", "tasks", "engine", "examples", "benchmarks", "requirements", "docker", "tests"]
ABOVE_THE_BOUNDARY = ("engine.spec", "engine.layout", "engine.errors", "engine.store", "engine.statistics",
                      "engine.rows", "engine.mlflow_sender")
HEAVY = {"torch", "vllm", "megatron", "transformers", "tensordict", "ray"}
BACKENDS = {"megatron": "engine/backends/megatron", "vllm": "engine/backends/vllm"}


def relative(path):
    return str(path.relative_to(ROOT))


def test_no_file_is_longer_than_600_lines():
    lengths = {relative(path): len(path.read_text().splitlines()) for path in files(".py", ".sh", ".md", ".yaml")}
    assert {name: lines for name, lines in lengths.items() if lines > 600} == {}


def functions(path):
    """(name, lines) of every function of a file."""
    return [(node.name, node.end_lineno - node.lineno + 1) for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_no_function_is_longer_than_60_lines():
    sources = [path for folder in SOURCES for path in python_files(folder)]
    assert {f"{relative(path)}:{name}": lines
            for path in sources for name, lines in functions(path) if lines > 60} == {}


def test_ruff_finds_nothing():
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "--output-format=concise", "."], cwd=ROOT,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_mypy_finds_nothing():
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("layer", ["dags", "tasks"])
def test_above_the_boundary_only_the_torch_free_modules_are_imported(layer):
    wrong = {}
    for path in python_files(layer):
        engine = {name for name in imports(path) if within(name, "engine") and name != "engine"}
        strangers = {name for name in engine if not any(within(name, allowed) for allowed in ABOVE_THE_BOUNDARY)}
        strangers |= {name for name in imports(path) if name.split(".")[0] in HEAVY}
        if strangers:
            wrong[relative(path)] = sorted(strangers)
    assert wrong == {}


def test_imports_go_downwards_only():
    wrong = {}
    for layer, above in (("tasks", {"dags"}), ("engine", {"dags", "tasks", "airflow"})):
        for path in python_files(layer):
            found = {name for name in imports(path) if name.split(".")[0] in above}
            if found:
                wrong[relative(path)] = sorted(found)
    assert wrong == {}


@pytest.mark.parametrize("library", sorted(BACKENDS))
def test_only_its_backend_imports_a_library(library):
    users = {relative(path) for path in python_files("engine") if any(within(n, library) for n in imports(path))}
    assert users, f"nothing imports {library}: is the test looking in the right place?"
    assert {name for name in users if not name.startswith(BACKENDS[library] + "/")} == set()


def test_parsing_the_dags_loads_no_engine_library_and_no_mlflow():
    code = ("import runpy, sys, pathlib\n"
            "found = sorted(pathlib.Path('dags').glob('*.py'))\n"
            "for path in found: runpy.run_path(str(path))\n"
            "heavy = {'torch', 'vllm', 'megatron', 'transformers', 'mlflow', 'boto3'}\n"
            "print(len(found), sorted(heavy & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    number, loaded = done.stdout.splitlines()[-1].split(" ", 1)
    assert int(number) >= 2 and loaded == "[]"


# Built from parts, so that this file does not match itself.
MACHINE = re.compile("|".join([
    r"(?<![\w.])/(?:work|root)" + "/", "/opt/" + "(?:wheels|pypi)", r"pypi\." + "org", "pythonhosted" + r"\.",
    r"debian\." + "org", r"npmjs\." + "org", r"proxy\.golang\." + "org", r"download\.pytorch\." + "org"]))


def test_no_path_of_a_machine_and_no_package_host_is_committed():
    found = {}
    for path in files():
        if path.suffix in {".png", ".gif", ".parquet", ".gz", ".safetensors"} or path.name == "LICENSE":
            continue
        hits = sorted(set(MACHINE.findall(path.read_text(errors="replace"))))
        if hits:
            found[relative(path)] = hits
    assert found == {}


def test_nothing_large_is_committed():
    assert {relative(path): path.stat().st_size for path in files() if path.stat().st_size > 2_000_000} == {}
