"""Metrics of a stage: always to files in the job directory, and from there to MLflow when it answers."""

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.fence import Fence
from engine.mlflow_sender import DatasetInput, Sender, parse_line
from engine.spec.job import METRICS_FILE, OUTBOX_FILE
from engine.spec.tracking import TrackingSpec, clean_metric_name

__all__ = ["DatasetInput", "Tracker", "clean_metric_name", "read_metrics"]


class Tracker:
    """Writes what a stage reports; rank 0 only. Use as a context manager: leaving it sends what is left.

    No call waits for the network. Nothing is lost while the server is away: a thread sends from the files, in order,
    and keeps how far it came. Sending again what the server had already (a kill between the answer and the note of it)
    changes nothing there, because a metric's time is fixed when it is written. A step that is in the file already (a
    resumed stage repeats it) is not written again. Without MLFLOW_TRACKING_URI or `spec.run_id` only files are written.
    """

    def __init__(self, job_dir: Path, spec: TrackingSpec) -> None:
        self._fence = Fence(job_dir)
        self._metrics, self._outbox = job_dir / METRICS_FILE, job_dir / OUTBOX_FILE
        for path in (self._metrics, self._outbox):
            _drop_torn_line(path)
        self._last_step = _last_step(self._metrics)
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._sender = Sender(job_dir, uri, spec.run_id) if uri and spec.run_id else None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one iteration. Steps rise; a step already written is skipped."""
        if step <= self._last_step:
            return
        values = {name: float(value) for name, value in metrics.items()}
        with self._fence.commit():
            self._append(self._metrics, {"step": step, "time": time.time(), "metrics": values})
        self._last_step = step

    def log_params(self, params: Mapping[str, object]) -> None:
        """Parameters of the run, to filter and compare runs by; MLflow refuses another value for one that is set."""
        self._append(self._outbox, {"params": {key: str(value) for key, value in params.items()}})

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Tags of the run."""
        self._append(self._outbox, {"tags": dict(tags)})

    def log_input(self, dataset: DatasetInput) -> None:
        """A prompt set the stage reads."""
        self._append(self._outbox, {"input": asdict(dataset)})

    def log_artifact(self, path: Path, folder: str = "") -> None:
        """Upload a file (it must stay where it is until `close`)."""
        self._append(self._outbox, {"artifact": str(path.resolve()), "folder": folder})

    def close(self, deadline_s: float = 30.0) -> bool:
        """Send what is left; False when the deadline passed first (the next Tracker of this directory goes on)."""
        return self._sender is None or self._sender.finish(deadline_s)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, path: Path, record: dict[str, Any]) -> None:
        # One write call: a kill leaves a whole line or a torn last one, which the next Tracker drops.
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            # A checkpoint that survives a power cut says that this step is done: its metrics must survive too.
            os.fsync(file.fileno())
        if self._sender:
            self._sender.wake()


def read_metrics(path: Path) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Every whole line of a `metrics.jsonl`: step, seconds since the epoch, metrics by name."""
    with path.open() as file:
        for line in file:
            record = parse_line(line)
            if record is not None:
                yield record["step"], record["time"], record["metrics"]


def _drop_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


def _last_step(path: Path) -> int:
    return max((step for step, _, _ in read_metrics(path)), default=-1) if path.exists() else -1
