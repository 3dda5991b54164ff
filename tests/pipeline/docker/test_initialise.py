"""docker/initialise.py against a real Airflow database and a real S3 server: prepares all of it, twice without harm."""

import json
import os
import sqlite3
import stat
import subprocess
import sys

import boto3
import pytest
from moto.server import ThreadedMotoServer

from tests.pipeline.docker.dockerfiles import FOLDER, ROOT


@pytest.fixture
def s3():
    """Address of an S3 server."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


def initialise(environment):
    return subprocess.run([sys.executable, FOLDER / "initialise.py", "ratchet", "mlflow"], cwd=ROOT, text=True,
                          env=environment, capture_output=True, check=False)


@pytest.mark.slow
def test_it_prepares_database_pool_password_and_buckets_and_can_run_again(s3, tmp_path):
    passwords = tmp_path / "passwords.json"
    keys = {"AWS_ACCESS_KEY_ID": "ratchet", "AWS_SECRET_ACCESS_KEY": "canary", "AWS_DEFAULT_REGION": "us-east-1"}
    environment = {
        **os.environ, **keys, "AWS_ENDPOINT_URL": s3, "AIRFLOW_HOME": str(tmp_path), "AIRFLOW_ADMIN_PASSWORD": "first",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(passwords), "AIRFLOW__CORE__LOAD_EXAMPLES": "false",
        "AIRFLOW__CORE__DAGS_FOLDER": str(tmp_path / "none"),
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{tmp_path}/airflow.db", "RATCHET_GPUS": "8"}
    for password in ("first", "second"):
        done = initialise({**environment, "AIRFLOW_ADMIN_PASSWORD": password})
        assert done.returncode == 0, done.stderr[-2000:]
        assert json.loads(passwords.read_text()) == {"admin": password}
        assert password not in done.stdout + done.stderr and "canary" not in done.stdout + done.stderr
    assert stat.S_IMODE(passwords.stat().st_mode) == 0o600
    with sqlite3.connect(tmp_path / "airflow.db") as database:
        assert database.execute("select slots from slot_pool where pool = 'gpus'").fetchall() == [(8,)]
    client = boto3.client(
        "s3", endpoint_url=s3, region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b")
    assert {bucket["Name"] for bucket in client.list_buckets()["Buckets"]} == {"ratchet", "mlflow"}


def test_it_stops_at_a_store_that_refuses(tmp_path):
    environment = {
        "PATH": os.environ["PATH"], "AIRFLOW_ADMIN_PASSWORD": "x", "AIRFLOW_HOME": str(tmp_path),
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(tmp_path / "passwords.json"),
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1", "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "canary", "AWS_DEFAULT_REGION": "us-east-1"}
    done = initialise(environment)
    assert done.returncode and "127.0.0.1:9" in done.stderr and "canary" not in done.stderr
    assert not (tmp_path / "airflow.db").exists(), "Airflow's tables come after the store"
