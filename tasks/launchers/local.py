"""Launcher `local`: the job runs on the machine of the Airflow worker, under a wrapper in a session of its own."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from engine.errors import FaultError, SpecError
from engine.spec.job import ATTEMPT_VARIABLE, HEARTBEAT_FILE, JOB_FILE
from tasks import deployment
from tasks.launchers.deadman import FIRST_BEAT_LIMIT_S, FOLLOWED_LIMIT_S, HEARTBEAT_LIMIT_S
from tasks.launchers.processes import JOB_VARIABLE, Mark, is_running, session_of

START_LIMIT_S = 30.0
LEASE_LIMIT_S = 300.0
"""To a free slot; then the job ends, so that its task gives its place in Airflow's pool to another."""
KILL_GRACE_S = 2.5
WITHOUT_SLOT = ("prepare", "report")
FOREIGN_HEARTBEAT_S = 60.0
"""A job of another host counts as alive when its heartbeat is younger than this: its pids mean nothing here."""

PASSED_ON = frozenset((
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "LD_PRELOAD",
    "CC", "CXX", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "CURL_CA_BUNDLE",
    "REQUESTS_CA_BUNDLE", "TOKENIZERS_PARALLELISM", "MLFLOW_DISABLE_TELEMETRY", "RATCHET_JUDGE_KEY"))
PASSED_PREFIXES = (
    "LC_", "XDG_", "PYTHON", "SSL_CERT_", "AWS_", "MLFLOW_TRACKING_", "MLFLOW_S3_", "MLFLOW_HTTP_REQUEST_", "HF_",
    "TRANSFORMERS_", "VLLM_", "TORCH", "PYTORCH_", "TRITON_", "CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "NCCL_", "GLOO_",
    "OMP_", "MKL_", "KMP_", "OPENBLAS_", "MALLOC_")
"""Variables that an engine and its libraries read. All others, such as passwords of databases, stay with the worker;
RATCHET_STACK among them, since jobs outlive the stack that started them."""


def start(directory: Path, stage: str, *, attempt: int, ranks: int, stall_limit_s: int) -> None:
    """Start the wrapper of a job and wait until it has written job.json."""
    root = Path(__file__).resolve().parents[2]
    slots, need, gpus = slots_for(stage, ranks)
    command = [deployment.engine_python(), "-u", "-m", "engine", stage, str(directory)]
    config = {"directory": str(directory), "attempt": attempt, "command": command, "slots": slots, "need": need,
              "gpus": gpus, "lease_limit_s": LEASE_LIMIT_S,
              "limits": {"heartbeat_limit_s": HEARTBEAT_LIMIT_S, "first_limit_s": FIRST_BEAT_LIMIT_S,
                         "stall_limit_s": stall_limit_s, "followed_limit_s": FOLLOWED_LIMIT_S}}
    names = PASSED_ON | deployment.engine_environment()
    environment = {k: v for k, v in os.environ.items() if k in names or k.startswith(PASSED_PREFIXES)}
    environment |= {JOB_VARIABLE: str(directory), ATTEMPT_VARIABLE: str(attempt), "PYTHONPATH": str(root),
                    "PYTHONUNBUFFERED": "1"}
    wrapper = subprocess.Popen(
        [sys.executable, "-m", "tasks.launchers.wrapper", json.dumps(config)], env=environment, cwd=root,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + START_LIMIT_S
    while not (directory / JOB_FILE).exists():
        if wrapper.poll() is not None and not (directory / JOB_FILE).exists():
            raise FaultError(f"{directory}: its wrapper ended with {wrapper.returncode} before it started the job")
        if time.monotonic() > deadline:
            mark_of(directory).end(grace_s=0.0)
            raise FaultError(f"{directory}: the job's wrapper did not start within {START_LIMIT_S:.0f} s")
        time.sleep(0.02)


def alive(directory: Path, record: dict[str, Any]) -> bool:
    """Whether the wrapper of this record still runs."""
    if record["host"] == socket.gethostname():
        return is_running(record)
    try:
        return time.time() - (directory / HEARTBEAT_FILE).stat().st_mtime < FOREIGN_HEARTBEAT_S
    except OSError:
        return False


def kill(directory: Path) -> None:
    """End every process of the job: SIGTERM, then SIGKILL."""
    left = mark_of(directory).end(grace_s=KILL_GRACE_S)
    if left:
        raise FaultError(f"{directory}: processes {sorted(left)} survive SIGKILL: the kernel holds them")


def mark_of(directory: Path) -> Mark:
    """How to recognise the processes of a job's last attempt."""
    try:
        record = json.loads((directory / JOB_FILE).read_text())
    except (OSError, ValueError):
        return Mark(directory)
    here = record["host"] == socket.gethostname()
    return Mark(directory, sessions=frozenset(session_of(record, directory) if here else ()))


def slots_for(stage: str, ranks: int) -> tuple[list[str], int, bool]:
    """The slot files of this machine, how many of them the job holds, and whether a slot is a GPU.

    Without GPUs the whole machine is one slot. Stages that load no model need none.

    Raises:
        SpecError: the job needs more GPUs than there are.
    """
    gpus = deployment.gpus()
    need = 0 if stage in WITHOUT_SLOT else (ranks if gpus else 1)
    if gpus and need > gpus:
        raise SpecError(f"layout: the job needs {need} GPUs but this machine has RATCHET_GPUS={gpus}")
    folder = deployment.home() / "slots" / socket.gethostname()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return [str(folder / f"{'gpu' if gpus else 'cpu'}-{i}.lock") for i in range(gpus or 1)], need, bool(gpus)
