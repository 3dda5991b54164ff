"""docs/operations.md: every command exists with its flags, every variable and file that it names has a reader."""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.pipeline.repository.source_tree import ROOT

DOCUMENTS = [ROOT / "docs" / name for name in ("operations.md", "install.md", "reliability.md")]
TEXT = "\n".join(document.read_text() for document in DOCUMENTS)


def commands(program):
    """What stands in back quotes or at the start of a line of a code block, without comments."""
    found = re.findall(rf"`({program} [^`]+)`", TEXT) + re.findall(rf"^({program} [^#\n]+)", TEXT, re.MULTILINE)
    return sorted({command.strip() for command in found})


@pytest.fixture(scope="module")
def airflow_parser(tmp_path_factory):
    os.environ.setdefault("AIRFLOW_HOME", str(tmp_path_factory.mktemp("airflow")))
    from airflow.cli import cli_parser

    return cli_parser.get_parser()


def test_airflow_knows_every_airflow_command_and_its_arguments(airflow_parser):
    assert len(commands("airflow")) > 8
    for command in commands("airflow"):
        try:
            airflow_parser.parse_args(shlex.split(command)[1:])
        except SystemExit:
            pytest.fail(f"airflow does not know: {command}")


def test_the_bundles_that_the_document_sets_are_what_airflow_reads():
    [text] = re.findall(r"`AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST='(.*?)'`", TEXT)
    for bundle in json.loads(text):
        module, _, name = bundle["classpath"].rpartition(".")
        kind = getattr(importlib.import_module(module), name)
        assert kind(name=bundle["name"], **bundle["kwargs"]).path is not None


def test_mlflow_knows_every_mlflow_command():
    groups = {command.split()[1] for command in commands("mlflow")}
    shown = subprocess.check_output([sys.executable, "-m", "mlflow", "--help"], text=True)
    assert groups and all(re.search(rf"^  {group} ", shown, re.MULTILINE) for group in groups), groups


def test_every_variable_of_ours_is_read_somewhere():
    code = "\n".join(path.read_text() for folder in ("tasks", "engine", "docker")
                     for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".yaml", ".Dockerfile"))
    named = set(re.findall(r"\bRATCHET_[A-Z_]+\b", TEXT))
    assert len(named) > 8 and [name for name in named if name not in code] == []


def test_every_setting_of_airflow_that_is_named_is_one(airflow_parser):
    from airflow.configuration import conf

    for section, key in re.findall(r"\bAIRFLOW__([A-Z_]+?)__([A-Z_]+)\b", TEXT):
        known = conf.configuration_description.get(section.lower(), {"options": {}})["options"]
        assert key.lower() in known, (section, key)


def test_every_file_of_a_job_that_the_runbook_names_is_one():
    from engine.spec import job

    contract = {value for name, value in vars(job).items() if name.endswith("_FILE")}
    named = set(re.findall(r"JOB/([a-z.]+[a-z])\b(?!/)", TEXT)) - {"attempts"}
    assert named and named <= contract
