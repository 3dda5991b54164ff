"""A real MLflow server for tests: SQLite, 127.0.0.1, a free port, its own process group."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

PIPELINE_PYTHON = os.environ.get("RATCHET_PIPELINE_PYTHON") or str(
    Path(__file__).parents[1] / ".venv" / "pipeline" / "bin" / "python")
START_LIMIT_S = 180.0


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class MlflowServer:
    """Start, stop and start again on the same port with the same data."""

    def __init__(self, directory: Path, port: int | None = None) -> None:
        self.directory, self.port = directory, port or free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen | None = None

    def start(self) -> "MlflowServer":
        """Return when the server answers."""
        python = PIPELINE_PYTHON if Path(PIPELINE_PYTHON).exists() else sys.executable
        environment = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
        environment |= {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with (self.directory / "mlflow.log").open("a") as log:
            self._process = subprocess.Popen(
                [python, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1",
                 "--backend-store-uri", f"sqlite:///{self.directory}/mlflow.db",
                 "--artifacts-destination", str(self.directory / "artifacts")],
                stdout=log, stderr=log, env=environment, cwd=self.directory, start_new_session=True)
        deadline = time.monotonic() + START_LIMIT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                tail = (self.directory / "mlflow.log").read_text()[-3000:]
                self.stop()
                raise RuntimeError(f"the MLflow server did not start within {START_LIMIT_S:.0f} s:\n{tail}")
            time.sleep(0.3)
        return self

    def stop(self) -> None:
        """Kill the server and its workers."""
        if self._process is not None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it ended by itself
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=2) as answer:
                return answer.status == 200
        except OSError:
            return False
