"""Servers that tests of the pipeline share (started once a session), a deployment with a stand-in for the engine."""

import json
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.launchers import local
from tests.mlflow_server import MlflowServer
from tests.pipeline.airflow_stack import Airflow
from tests.pipeline.fake_engine import REAL_ENGINE

REAL_ITERATIONS = 3
"""Of each of the two stages of `real_run`."""
FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    """A running MLflow server; its address is `mlflow_server.uri`."""
    directory: Path = tmp_path_factory.mktemp("mlflow")
    server = MlflowServer(directory).start()
    yield server
    server.stop()


@pytest.fixture
def mlflow_uri(mlflow_server: MlflowServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """The server's address, set as MLFLOW_TRACKING_URI for this test."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server.uri)
    return mlflow_server.uri



def write_engine(path: Path) -> Path:
    """An executable that behaves as the engine's interpreter would: `PATH -u -m engine STAGE JOB_DIR`."""
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE_ENGINE}" "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


class Deployment:
    """A RATCHET_HOME of its own."""

    def __init__(self, home: Path):
        self.home = home
        self.plan_file = home / "plan.json"
        self.plan({})

    def plan(self, behaviours: dict[str, list[dict]]) -> None:
        """What the stand-in does, by task and attempt."""
        self.plan_file.write_text(json.dumps(behaviours))


@pytest.fixture
def deployment(tmp_path, monkeypatch):
    """RATCHET_HOME in a temporary directory; no process of its jobs outlives the test."""
    made = Deployment(tmp_path)
    monkeypatch.setenv("RATCHET_HOME", str(tmp_path))
    monkeypatch.setenv("RATCHET_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("RATCHET_ENGINE_PYTHON", str(write_engine(tmp_path / "python")))
    monkeypatch.setenv("RATCHET_FAKE_PLAN", str(made.plan_file))
    monkeypatch.setenv("RATCHET_ENGINE_ENV", "RATCHET_FAKE_PLAN")
    monkeypatch.delenv("RATCHET_GPUS", raising=False)
    yield made
    for record in (tmp_path / "jobs").glob("**/job.json"):
        local.kill(record.parent)
        assert not local.mark_of(record.parent).processes()


@pytest.fixture(scope="session")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    """Airflow and MLflow as `make demo` starts them, with the stand-in for the engine."""
    home = tmp_path_factory.mktemp("stack")
    engine = write_engine(home / "python")
    with Airflow(home, engine) as started:
        yield started


@pytest.fixture(scope="session")
def real_run(airflow: Airflow) -> str:
    """The training run `end-to-end`, done by the real engine, and its finished review; the review's run id."""
    if not Path(REAL_ENGINE).exists():
        pytest.skip("no engine environment; `make setup`")
    model = airflow.home / "models" / "real"
    subprocess.run([REAL_ENGINE, "examples/models.py", "tiny", str(model)], check=True)
    airflow.plan({"real": ["/end-to-end/", "/review_candidate/", "/evaluate_model/"]})
    airflow.api.trigger("train_ppo", {"preset": "real", "iterations": REAL_ITERATIONS}, "end-to-end")
    states = airflow.finished("end-to-end", seconds=500)
    assert set(states.values()) == {"success", "skipped"}, states
    review = airflow.review_of("end-to-end")
    airflow.finished(review, "review_candidate", seconds=200)
    return review
