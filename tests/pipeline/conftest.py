"""Servers that tests of the pipeline share: started once a session."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mlflow_server import MlflowServer


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
