"""A real MLflow server for tests: SQLite, 127.0.0.1, a free port, its own process group."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

PIPELINE_PYTHON = os.environ.get("RATCHET_PIPELINE_PYTHON") or str(
    Path(__file__).parents[1] / ".venv" / "pipeline" / "bin" / "python")
START_LIMIT_S = 180.0
WEBHOOKS = {"MLFLOW_WEBHOOK_ALLOWED_SCHEMES": "http", "MLFLOW_WEBHOOK_ALLOW_PRIVATE_IPS": "true",
            "MLFLOW_WEBHOOK_CACHE_TTL": "0"}
"""A receiver on this machine, seen at once."""


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
        environment |= {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"} | WEBHOOKS
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


class Forwarder:
    """A port that can be cut from the server behind it and joined again: an outage without restarting the server."""

    def __init__(self, target_port: int) -> None:
        self.port, self._target_port = free_port(), target_port
        self.uri = f"http://127.0.0.1:{self.port}"
        self._listener: socket.socket | None = None
        self._open: list[socket.socket] = []

    def join(self) -> None:
        """Accept connections from now on."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self) -> None:
        """Close every connection and refuse new ones."""
        for end in [self._listener, *self._open]:
            if end is not None:
                with contextlib.suppress(OSError):  # the other side may have gone
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
        self._listener, self._open = None, []

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return  # cut
            far = socket.create_connection(("127.0.0.1", self._target_port))
            self._open += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    @staticmethod
    def _copy(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):  # cut in the middle of a message
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
