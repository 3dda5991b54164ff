"""The thread that carries a job directory's metrics to MLflow: in order, once, whenever the server answers."""

import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.spec.job import METRICS_FILE, OUTBOX_FILE, SENT_FILE
from engine.spec.tracking import clean_metric_name
from engine.store import write_atomic

METRICS_PER_REQUEST = 1000
"""MLflow refuses more in one log_batch; of parameters it takes 100."""
PARAMS_PER_REQUEST = 100
FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 30.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DatasetInput:
    """A prompt set as an MLflow input of the run."""

    name: str
    digest: str
    """sha256 of the manifest; MLflow keeps 36 characters of it."""
    source: str
    """URI of the prepared set."""
    context: str = "training"
    """`training` or `evaluation`."""


def parse_line(line: str | bytes) -> dict[str, Any] | None:
    """The JSON object of one line; None, with a warning, for what is none."""
    try:
        return json.loads(line)
    except ValueError:
        log.warning("tracking: a line that is not JSON is left out: %.80r", line)
        return None


def unsent_bytes(job_dir: Path) -> int:
    """What of a job's metrics and messages MLflow does not have yet."""
    sent = json.loads((job_dir / SENT_FILE).read_text()) if (job_dir / SENT_FILE).exists() else {}
    files = {"metrics": job_dir / METRICS_FILE, "outbox": job_dir / OUTBOX_FILE}
    return sum(path.stat().st_size - sent.get(name, 0) for name, path in files.items() if path.exists())


class _Refused(Exception):
    """The server will never take this; trying again cannot help."""


class Sender:
    """Sends what is in the files and what is added to them, until `finish`."""

    def __init__(self, job_dir: Path, uri: str, run_id: str) -> None:
        self._paths = {"metrics": job_dir / METRICS_FILE, "outbox": job_dir / OUTBOX_FILE}
        self._sent_file, self._uri, self._run_id = job_dir / SENT_FILE, uri, run_id
        self._sent = {"outbox": 0, "metrics": 0}
        if self._sent_file.exists():
            self._sent |= json.loads(self._sent_file.read_text())
        self._client: Any = None
        self._woken, self._finishing = threading.Event(), threading.Event()
        self._woken.set()
        self._thread = threading.Thread(target=self._run, name="mlflow", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There is something to send."""
        self._woken.set()

    def finish(self, deadline_s: float) -> bool:
        """Wait until everything is sent, at most `deadline_s` seconds."""
        self._finishing.set()
        self._woken.set()
        self._thread.join(deadline_s)
        left = unsent_bytes(self._sent_file.parent)
        if left:
            log.warning("tracking: MLflow did not take everything within %.0f s, %d bytes are kept in %s",
                        deadline_s, left, self._sent_file.parent)
        return not left

    def _size(self, name: str) -> int:
        path = self._paths[name]
        return path.stat().st_size if path.exists() else 0

    def _run(self) -> None:
        delay = 0.0
        while True:
            self._woken.wait()
            self._woken.clear()
            try:
                while self._send_outbox() or self._send_metrics():
                    delay = 0.0
            except _unreachable() as error:
                if not delay:
                    # Not the message: it may hold the address with a password.
                    log.warning("tracking: MLflow does not answer (%s); metrics are kept and sent later",
                                type(error).__name__)
                delay = min(max(FIRST_DELAY_S, 2 * delay), LONGEST_DELAY_S)
                self._pause(delay)
                continue
            if self._finishing.is_set() and not self._woken.is_set():
                return

    def _pause(self, delay: float) -> None:
        """Wait before another try; while finishing there is a deadline, so try often."""
        if self._finishing.is_set():
            time.sleep(FIRST_DELAY_S)
        else:
            self._finishing.wait(delay)
        self._woken.set()

    def _lines(self, name: str) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """Unsent whole lines: the offset after each, and its record."""
        path = self._paths[name]
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(min(self._sent[name], self._size(name)))
            for line in file:
                if not line.endswith(b"\n"):
                    return
                yield file.tell(), parse_line(line)

    def _note(self, name: str, offset: int) -> None:
        self._sent[name] = offset
        write_atomic(self._sent_file, json.dumps(self._sent))

    def _send_metrics(self) -> bool:
        """Send one request's worth of iterations; False when there are none."""
        records: list[dict[str, Any]] = []
        offset, count = 0, 0
        for end, record in self._lines("metrics"):
            size = len(record["metrics"]) if record else 0
            if count and count + size > METRICS_PER_REQUEST:
                break
            offset, count = end, count + size
            records += [record] if record else []
        if not offset:
            return False
        try:
            self._log_metrics(records)
        except _Refused:
            # One bad iteration must not take its neighbours along.
            for record in records:
                self._log_or_drop(record)
        self._note("metrics", offset)
        return True

    def _log_or_drop(self, record: dict[str, Any]) -> None:
        try:
            self._log_metrics([record])
        except _Refused as error:
            log.warning("tracking: MLflow refused step %s: %s", record["step"], error)

    def _log_metrics(self, records: list[dict[str, Any]]) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(clean_metric_name(name), value, int(record["time"] * 1000), record["step"])
                   for record in records for name, value in record["metrics"].items()]
        for start in range(0, len(metrics), METRICS_PER_REQUEST):
            self._call("log_batch", metrics=metrics[start : start + METRICS_PER_REQUEST])

    def _send_outbox(self) -> bool:
        """Send one message that is not a metric; False when there is none."""
        for offset, record in self._lines("outbox"):
            try:
                self._deliver(record or {})
            except _Refused as error:
                log.warning("tracking: MLflow refused %s: %s", ", ".join(record or {}), error)
            self._note("outbox", offset)
            return True
        return False

    def _deliver(self, record: dict[str, Any]) -> None:
        from mlflow.entities import Dataset, InputTag, Param, RunTag
        from mlflow.entities import DatasetInput as MlflowInput

        if "params" in record:
            params = [Param(clean_metric_name(key), value) for key, value in record["params"].items()]
            for start in range(0, len(params), PARAMS_PER_REQUEST):
                self._call("log_batch", params=params[start : start + PARAMS_PER_REQUEST])
        if "tags" in record:
            self._call("log_batch", tags=[RunTag(key, value) for key, value in record["tags"].items()])
        if "input" in record:
            given = DatasetInput(**record["input"])
            kind = given.source.split("://")[0] if "://" in given.source else "local"
            dataset = Dataset(given.name, given.digest[:36], kind, json.dumps({"uri": given.source}))
            self._call("log_inputs", datasets=[MlflowInput(dataset, [InputTag("mlflow.data.context", given.context)])])
        if "artifact" in record:
            if not Path(record["artifact"]).is_file():
                raise _Refused(f"{record['artifact']} is gone")
            self._call("log_artifact", local_path=record["artifact"], artifact_path=record["folder"] or None)

    def _call(self, method: str, **arguments: Any) -> None:
        """One request to the run.

        Raises:
            _Refused: the server says that the request itself is wrong.
        """
        from mlflow.exceptions import MlflowException, RestException

        if self._client is None:
            self._client = _connect(self._uri)
        try:
            getattr(self._client, method)(self._run_id, **arguments)
        except MlflowException as error:
            refused = {"INVALID_PARAMETER_VALUE"}
            if isinstance(error, RestException):
                refused |= {"RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS", "INVALID_STATE", "BAD_REQUEST"}
            if error.error_code in refused:
                raise _Refused(f"{error.error_code} {error.message:.200}") from None
            raise


def _connect(uri: str) -> Any:
    # Retrying is this module's work, with the files behind it; the client's own would block for minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def _unreachable() -> tuple[type[Exception], ...]:
    from mlflow.exceptions import MlflowException

    return (MlflowException, OSError)
