"""A real MLflow server for the tests of this folder."""

from collections.abc import Iterator

import pytest
from mlflow import MlflowClient

from tests.mlflow_server import MlflowServer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    """Started once, from the pipeline environment."""
    running = MlflowServer(tmp_path_factory.mktemp("mlflow")).start()
    yield running
    running.stop()


@pytest.fixture
def client(server: MlflowServer, monkeypatch: pytest.MonkeyPatch) -> MlflowClient:
    """A client of it; MLFLOW_TRACKING_URI is set for the test."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    return MlflowClient(tracking_uri=server.uri)
