"""compose.yaml: valid, local, without literal secrets, and every name in it means something to what it configures."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.pipeline.docker.dockerfiles import FOLDER, ROOT

FILE = FOLDER / "compose.yaml"
TEXT = FILE.read_text()
SERVICES = yaml.safe_load(TEXT)["services"]
SECRETS = sorted(set(re.findall(r"\$\{(\w+):\?", TEXT)))
OURS = {name: service for name, service in SERVICES.items() if service["image"].startswith("ratchet-")}
VALUES = {name: f"canary-{name.lower()}" for name in SECRETS}


def compose():
    """The compose command of this machine, or None."""
    plugin = ["docker", "compose"]
    if shutil.which("docker") and not subprocess.run([*plugin, "version"], capture_output=True, check=False).returncode:
        return plugin
    return ["docker-compose"] if shutil.which("docker-compose") else None


def config(environment, tmp_path):
    # Away from the repository: a developer's own docker/.env must not decide.
    shutil.copytree(FOLDER, tmp_path / "docker", ignore=shutil.ignore_patterns(".env", "*.py"))
    return subprocess.run([*compose(), "-f", "docker/compose.yaml", "config"], cwd=tmp_path, capture_output=True,
                          text=True, check=False, env={**environment, "PATH": os.environ["PATH"]})


needs_compose = pytest.mark.skipif(
    compose() is None, reason="no docker compose here (Debian: docker-compose); other tests read the file")


@needs_compose
def test_docker_compose_accepts_the_file_and_fills_in_the_secrets(tmp_path):
    done = config({**VALUES, "RATCHET_GPUS": "8"}, tmp_path)
    assert done.returncode == 0, done.stderr
    services = yaml.safe_load(done.stdout)["services"]
    assert set(services) == set(SERVICES)
    scheduler = services["scheduler"]["environment"]
    assert scheduler["RATCHET_GPUS"] == "8"
    assert scheduler["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"].endswith(f":{VALUES['POSTGRES_PASSWORD']}@postgres/airflow")


@needs_compose
@pytest.mark.parametrize("missing", SECRETS)
def test_docker_compose_refuses_to_start_without_a_secret_and_says_where_to_read(missing, tmp_path):
    done = config({name: value for name, value in VALUES.items() if name != missing}, tmp_path)
    assert done.returncode and "docs/install.md" in done.stderr


def test_no_secret_is_written_down_and_the_guide_makes_each_of_them():
    guide = (ROOT / "docs" / "install.md").read_text()
    assert len(SECRETS) >= 6 and all(re.search(rf"\b{name}\b", guide) for name in SECRETS)
    for service in SERVICES.values():
        for name, value in service.get("environment", {}).items():
            if re.search(r"PASSWORD$|SECRET|_KEY$", name):
                assert re.fullmatch(r"\$\{\w+:\?[^}]+\}", value), name


def test_ports_are_open_to_this_machine_only():
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports and all(port.startswith("127.0.0.1:") for port in ports)


def test_images_of_others_are_pinned_and_ours_carry_the_projects_version():
    from engine import __version__

    for service in SERVICES.values():
        name, _, tag = service["image"].partition(":")
        assert tag and tag != "latest", service["image"]
        assert tag == __version__ or not name.startswith("ratchet-")


def test_what_a_service_waits_for_exists_and_can_come_true():
    for service in SERVICES.values():
        for name, wait in service.get("depends_on", {}).items():
            assert wait["condition"] != "service_healthy" or "healthcheck" in SERVICES[name]
            assert wait["condition"] != "service_completed_successfully" or SERVICES[name]["restart"] == "no"


def test_every_image_of_ours_is_built_from_an_existing_dockerfile_by_some_service():
    built = {service["image"]: service["build"]["dockerfile"] for service in OURS.values() if "build" in service}
    assert set(built) == {service["image"] for service in OURS.values()}
    assert all((ROOT / dockerfile).is_file() for dockerfile in built.values())


def test_our_containers_have_no_privileges():
    for service in OURS.values():
        assert service["cap_drop"] == ["ALL"] and "no-new-privileges:true" in service["security_opt"]
        assert not service.get("privileged")


def test_the_worker_alone_has_the_gpus_the_engine_and_the_job_directories():
    device = SERVICES["scheduler"]["deploy"]["resources"]["reservations"]["devices"][0]
    assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"]
    assert [name for name, service in SERVICES.items() if "deploy" in service] == ["scheduler"]
    assert [name for name, service in OURS.items() if service["image"].startswith("ratchet-engine")] == ["scheduler"]
    assert any(volume.endswith(":/var/lib/ratchet") for volume in SERVICES["scheduler"]["volumes"])


def test_named_volumes_are_declared_and_mounted_files_exist():
    declared = set(yaml.safe_load(TEXT)["volumes"])
    used = {volume.split(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])
            if not volume.startswith("$")}
    assert {name for name in used if not name.startswith(".")} == declared
    assert all((FOLDER / name).exists() for name in used if name.startswith("."))


def test_every_airflow_setting_is_one_that_airflow_has():
    from airflow.configuration import conf

    known = {(section.lower(), option.lower())
             for section, options in conf.configuration_description.items() for option in options["options"]}
    for service in OURS.values():
        for name in service["environment"]:
            if name.startswith("AIRFLOW__"):
                _, section, option = name.lower().split("__")
                assert (section, option) in known, name


def test_every_ratchet_variable_has_a_reader():
    readers = (ROOT / "tasks" / "deployment.py").read_text()
    text = TEXT + (FOLDER / "engine.Dockerfile").read_text()
    for name in set(re.findall(r"^\s+(RATCHET_\w+)[:=]", text, re.MULTILINE)):
        assert f'"{name}"' in readers, name


@pytest.mark.slow
def test_the_commands_exist_with_the_flags_that_are_given():
    programs = Path(sys.executable).parent
    for service in OURS.values():
        program, *arguments = service["command"]
        if program == "python":
            assert (ROOT / arguments[0]).is_file()
            continue
        shown = subprocess.run([programs / program, arguments[0], "--help"], capture_output=True, text=True, check=True)
        assert all(flag in shown.stdout for flag in arguments if flag.startswith("--")), service["command"]


def test_the_mlflow_server_accepts_the_name_it_has_in_the_network():
    """MLflow refuses Host headers that it was not told of, and the workers call it `mlflow:5000`."""
    from mlflow.server.security_utils import is_allowed_host_header

    command = SERVICES["mlflow"]["command"]
    allowed = command[command.index("--allowed-hosts") + 1].split(",")
    uri = SERVICES["scheduler"]["environment"]["MLFLOW_TRACKING_URI"]
    assert is_allowed_host_header(allowed, uri.removeprefix("http://"))
    assert is_allowed_host_header(allowed, "127.0.0.1:5000")
    assert not is_allowed_host_header(allowed, "elsewhere.example")
