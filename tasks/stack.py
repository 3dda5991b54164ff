"""The local stack: Airflow and the MLflow server on this machine, 127.0.0.1 only, SQLite, all below one directory.

`python -m tasks.stack [--home DIR]` starts it, restarts what dies, and on Ctrl-C or SIGTERM stops it, engine jobs
included, leaving nothing running. A second start finds databases, passwords and (when they are free) ports as they
were. For one machine and one person: a deployment for many has its own Airflow.
"""

import argparse
import contextlib
import fcntl
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from engine.errors import FaultError
from engine.store import write_atomic
from tasks import deployment, jobs
from tasks.airflow_api import AirflowAPI
from tasks.launchers import local
from tasks.launchers.processes import JOB_VARIABLE, Mark, identity, session_of

ROOT = Path(__file__).resolve().parents[1]
STACK_VARIABLE = "RATCHET_STACK"
"""Marks every process of the stack with its home, so that none is forgotten."""
USER = "admin"
STATE_FILE = "stack.json"
AIRFLOW_PORT, MLFLOW_PORT = 8080, 5000
START_LIMIT_S = 300.0
TASK_GRACE_S = 8.0
STOP_GRACE_S = 5.0
LONGEST_BACKOFF_S = 30.0
SQLITE_WAIT_S = 60
"""For whoever else writes to Airflow's database, before a request fails; Python's own 5 s are few on a busy machine."""
STEADY_S = 60.0
"""What lived for so long had started well: its earlier deaths no longer count."""


@dataclass(frozen=True)
class Databases:
    """Where Airflow and MLflow keep their tables: SQLAlchemy URLs."""

    airflow: str
    mlflow: str


@dataclass
class Component:
    """One server process and how often it died."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    """Its own, beside the stack's."""
    process: subprocess.Popen | None = None
    deaths: int = 0
    """In a row."""
    started_at: float = 0.0
    restart_at: float = 0.0


class Stack:
    """The processes of one home directory. `start()`, use it, `stop()`; a thread restarts what dies in between."""

    def __init__(self, home: Path, *, environment: dict[str, str] | None = None, databases: Databases | None = None,
                 say: Callable[[str], None] = print):
        """Set up, start nothing.

        Args:
            home: made when absent.
            environment: added to every component's.
            databases: that exist; None: SQLite files in the home.
            say: gets one line per step.
        """
        self.home = home.resolve()
        self._databases = databases or Databases(
            airflow=f"sqlite:///{self.home}/airflow/airflow.db?timeout={SQLITE_WAIT_S}",
            mlflow=f"sqlite:///{self.home}/mlflow/mlflow.db")
        self._say = say
        self._extra = environment or {}
        self._components: list[Component] = []
        self._monitor = threading.Thread(target=self._watch, name="stack", daemon=True)
        self._stopping = threading.Event()
        self._lock: IO[str] | None = None
        self._records: dict[str, dict[str, Any]] = {}

    def start(self) -> None:
        """Return when Airflow can run DAGs and MLflow answers.

        Raises:
            FaultError: another stack runs in this home, or a component did not come up; with its log's last line.
        """
        self._prepare_home()
        self._lock = self._take_lock()
        # Left over from a stack that was killed: its components hold the ports and the database. Its tasks without a
        # word: on SIGTERM they would end their engine jobs, which the next try of each takes over.
        self._mark("scheduler").kill()
        self._end_components()
        self._choose_ports()
        python, airflow = sys.executable, [sys.executable, "-m", "airflow"]
        mlflow = self._launch("mlflow", [
            python, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.mlflow_port), "--workers", "1",
            "--artifacts-destination", str(self.home / "mlflow" / "artifacts")],
            # Not an argument: it may hold a password, and everybody sees those.
            {"MLFLOW_BACKEND_STORE_URI": self._databases.mlflow})
        self._migrate(airflow)
        api = self._launch("api-server", [
            *airflow, "api-server", "--host", "127.0.0.1", "--port", str(self.airflow_port), "--workers", "1"])
        self._launch("dag-processor", [*airflow, "dag-processor"])
        self._launch("scheduler", [python, "-m", "tasks.warm_scheduler", self.airflow_url])
        self._wait_for(api, f"{self.airflow_url}/api/v2/version")
        self._make_pool()
        self._wait_for(mlflow, f"{self.mlflow_url}/health")
        self._launch("triggerer", [*airflow, "triggerer", "--skip-serve-logs"])
        self._monitor.start()

    def stop(self) -> None:
        """End engine jobs and all components; nothing is left. Does nothing in a home that is another stack's."""
        if self._lock is None:
            return
        self._stopping.set()
        if self._monitor.is_alive():
            self._monitor.join()
        self._end_components()
        # After the scheduler: nothing can start another one now.
        for directory in jobs.running(self.home, local, or_lost=True):
            jobs.kill(directory, local)
        for component in self._components:
            if component.process is not None:
                component.process.wait()
        (self.home / STATE_FILE).unlink(missing_ok=True)
        self._lock.close()
        self._lock = None

    @property
    def airflow_url(self) -> str:
        """Where Airflow's UI and API are."""
        return f"http://127.0.0.1:{self.airflow_port}"

    @property
    def mlflow_url(self) -> str:
        """Where MLflow's UI and API are."""
        return f"http://127.0.0.1:{self.mlflow_port}"

    @property
    def password(self) -> str:
        """Of the user `admin`."""
        return read_password(self.home)

    def pid_of(self, name: str) -> int:
        """Pid of a component now."""
        return next(c.process.pid for c in self._components if c.name == name and c.process is not None)

    def processes(self) -> set[int]:
        """Pids of all processes of the stack, without engine jobs."""
        return self._mark().processes()

    def environment(self) -> dict[str, str]:
        """The environment of every component."""
        return {k: v for k, v in os.environ.items() if not k.startswith("AIRFLOW_")} | {
            STACK_VARIABLE: str(self.home),
            "RATCHET_HOME": str(self.home),
            "RATCHET_STORE": os.environ.get("RATCHET_STORE") or str(self.home / "store"),
            "RATCHET_ENGINE_PYTHON": os.environ.get("RATCHET_ENGINE_PYTHON") or str(ROOT / ".venv/engine/bin/python"),
            "MLFLOW_TRACKING_URI": self.mlflow_url, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1",
        } | self._airflow_environment() | MLFLOW_SETTINGS | self._extra

    def _airflow_environment(self) -> dict[str, str]:
        keys = json.loads((self.home / "secrets.json").read_text())
        return AIRFLOW_SETTINGS | {
            "AIRFLOW_HOME": str(self.home / "airflow"), "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
            "AIRFLOW__CORE__PLUGINS_FOLDER": str(ROOT / "tasks" / "plugins"),
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": self._databases.airflow,
            # A result that Airflow does not read to its end (a backfill's) keeps SQLite's view of that moment for as
            # long as its connection lives: in a pool, others would read from the past and could not write for 30 min.
            "AIRFLOW__DATABASE__SQL_ALCHEMY_POOL_ENABLED": str(not self._databases.airflow.startswith("sqlite")),
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": f"{USER}:admin",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(self.home / "password.json"),
            "AIRFLOW__CORE__FERNET_KEY": keys["fernet"], "AIRFLOW__API_AUTH__JWT_SECRET": keys["jwt"],
            "AIRFLOW__API__SECRET_KEY": keys["api"], "AIRFLOW__API__BASE_URL": self.airflow_url,
            "AIRFLOW__API__HOST": "127.0.0.1", "AIRFLOW__API__PORT": str(self.airflow_port),
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{self.airflow_url}/execution/"}

    def _prepare_home(self) -> None:
        for name in ("airflow", "mlflow", "logs"):
            (self.home / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        os.chmod(self.home, 0o700)
        if not (self.home / "secrets.json").exists():
            import base64

            fernet = base64.urlsafe_b64encode(secrets.token_bytes(32)).decode()
            _write_private(self.home / "secrets.json", {
                "fernet": fernet, "jwt": secrets.token_hex(32), "api": secrets.token_hex(32)})
        if not (self.home / "password.json").exists():
            _write_private(self.home / "password.json", {USER: secrets.token_urlsafe(12)})

    def _take_lock(self) -> IO[str]:
        lock = open(self.home / "stack.lock", "a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise FaultError(f"a stack runs in {self.home} already; stop it, or choose another --home") from None
        return lock

    def _choose_ports(self) -> None:
        remembered = jobs.read_json(self.home / "ports.json") or {}
        self.airflow_port = free_port(remembered.get("airflow", AIRFLOW_PORT))
        self.mlflow_port = free_port(remembered.get("mlflow", MLFLOW_PORT), taken=self.airflow_port)
        write_atomic(self.home / "ports.json", json.dumps({"airflow": self.airflow_port, "mlflow": self.mlflow_port}))

    def _migrate(self, airflow: list[str]) -> None:
        marker, wanted = self.home / "airflow" / "migrated", version("apache-airflow-core")
        if marker.exists() and marker.read_text() == wanted:
            return
        self._say("Making Airflow's database")
        component = self._launch("db-migrate", [*airflow, "db", "migrate"])
        self._components.remove(component)
        assert component.process is not None
        if component.process.wait():
            raise FaultError(f"airflow db migrate failed: {self._last_line('db-migrate')}")
        write_atomic(marker, wanted)

    def _make_pool(self) -> None:
        slots = max(1, deployment.gpus())
        body = {"name": "gpus", "slots": slots, "description": "GPUs that engine jobs use", "include_deferred": False}
        api = AirflowAPI(self.airflow_url, USER, self.password)
        if "gpus" not in [pool["name"] for pool in api.call("GET", "/pools")["pools"]]:
            api.call("POST", "/pools", body)

    def _launch(self, name: str, command: list[str], environment: dict[str, str] | None = None) -> Component:
        component = Component(name, command, environment or {})
        self._components.append(component)
        self._spawn(component)
        return component

    def _spawn(self, component: Component) -> None:
        with open(self.home / "logs" / f"{component.name}.log", "ab") as log:
            # A session of its own: Ctrl-C in the terminal is for the supervisor, which stops them in order.
            component.process = subprocess.Popen(
                component.command, env=self.environment() | component.environment, cwd=self.home,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        component.started_at = time.monotonic()
        self._records[component.name] = identity(component.process.pid)
        write_atomic(self.home / STATE_FILE, json.dumps({
            "airflow": self.airflow_url, "mlflow": self.mlflow_url, "components": self._records}))

    def _end_components(self) -> None:
        # The scheduler and its tasks first: while the API lives a task can end its engine and say that it was stopped.
        self._mark("scheduler").end(grace_s=TASK_GRACE_S)
        left = self._mark().end(grace_s=STOP_GRACE_S)
        if left:
            raise FaultError(f"processes {sorted(left)} of the stack in {self.home} survive SIGKILL")

    def _mark(self, only: str | None = None) -> Mark:
        """The processes of one component, or of all; engine jobs, which tasks have started, are none of them."""
        recorded = (jobs.read_json(self.home / STATE_FILE) or {}).get("components", {})
        sessions = frozenset(
            pid for name, record in recorded.items() if only in (None, name) for pid in session_of(record, self.home))
        return Mark(self.home, None if only else STACK_VARIABLE, sessions, spared=JOB_VARIABLE)

    def _wait_for(self, component: Component, url: str) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while not answers(url):
            assert component.process is not None
            if component.process.poll() is not None:
                raise FaultError(f"{component.name} ended with {component.process.returncode}: "
                                 f"{self._last_line(component.name)}")
            if time.monotonic() > deadline:
                raise FaultError(f"{component.name} did not answer at {url} within {START_LIMIT_S:.0f} s; "
                                 f"see {self.home}/logs/{component.name}.log")
            time.sleep(0.25)

    def _watch(self) -> None:
        while not self._stopping.wait(0.5):
            for component in self._components:
                try:
                    self._revive(component)
                except OSError as error:
                    # A full disk: the others need their supervisor all the same.
                    self._say(f"{component.name} cannot be started: {error}; trying again in {LONGEST_BACKOFF_S:.0f} s")
                    component.restart_at = time.monotonic() + LONGEST_BACKOFF_S

    def _revive(self, component: Component) -> None:
        now = time.monotonic()
        if component.process is not None:
            if component.process.poll() is None:
                return
            if now - component.started_at > STEADY_S:
                component.deaths = 0
            delay = min(LONGEST_BACKOFF_S, 2.0 ** component.deaths / 2)
            component.deaths += 1
            component.restart_at = now + delay
            self._say(f"{component.name} ended with {component.process.returncode}; starting it again")
            component.process = None
        if now < component.restart_at:
            return
        # A server's workers hold its port; a scheduler's go on with tasks that the next one gives to others. Not by
        # SIGTERM: a task would end its engine job.
        self._mark(component.name).kill()
        self._spawn(component)

    def _last_line(self, name: str) -> str:
        lines = (self.home / "logs" / f"{name}.log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"see {self.home}/logs/{name}.log"


AIRFLOW_SETTINGS = {
    "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
    "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
    "AIRFLOW__CORE__PARALLELISM": "4",
    "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
    "AIRFLOW__DATABASE__LOAD_DEFAULT_CONNECTIONS": "False",
    "AIRFLOW__DAG_PROCESSOR__PARSING_PROCESSES": "1",
    "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "60",
    # A machine that trains is slow to parse: a DAG must not vanish for that.
    "AIRFLOW__CORE__DAGBAG_IMPORT_TIMEOUT": "300",
    "AIRFLOW__DAG_PROCESSOR__DAG_FILE_PROCESSOR_TIMEOUT": "360",
    "AIRFLOW__DAG_PROCESSOR__STALE_DAG_THRESHOLD": "900",
    "AIRFLOW__SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.3",
    # A person's kill is noticed at the next heartbeat; the whole kill has 5 s.
    "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": "2",
    # At one every 2 s: a task lives through 5 minutes without an API server.
    "AIRFLOW__WORKERS__MAX_FAILED_HEARTBEATS": "150",
    # A task that ends meanwhile asks as long, 8 s between two tries, before it gives up on saying so.
    "AIRFLOW__WORKERS__EXECUTION_API_RETRIES": "40",
    "AIRFLOW__WORKERS__EXECUTION_API_RETRY_WAIT_MAX": "15",
    "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
}
MLFLOW_SETTINGS = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}


def free_port(wanted: int, *, taken: int = 0) -> int:
    """`wanted`, or the next port that nobody on 127.0.0.1 listens on.

    Raises:
        FaultError: none of the next hundred is free.
    """
    for port in range(wanted, wanted + 100):
        if port == taken:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise FaultError(f"no port from {wanted} to {wanted + 99} is free; end the programs that listen on them")


def answers(url: str) -> bool:
    """Whether a server answers with success."""
    try:
        with urllib.request.urlopen(url, timeout=3) as answer:  # noqa: S310 - our own http address
            return answer.status == 200
    except (OSError, ValueError):
        return False


def read_password(home: Path) -> str:
    """The password of the user `admin` of a home's Airflow."""
    return json.loads((home / "password.json").read_text())[USER]


def running_stack(home: Path) -> dict[str, Any] | None:
    """`airflow` and `mlflow` URLs of the stack that runs in `home`; None when none answers there."""
    found = jobs.read_json(home / STATE_FILE)
    return found if found and answers(f"{found['airflow']}/api/v2/version") else None


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP end the program as Ctrl-C does."""
    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {signum: signal.signal(signum, interrupt) for signum in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _write_private(path: Path, content: dict[str, str]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(content, file)


def main(arguments: list[str] | None = None) -> int:
    """Run a stack until it is interrupted."""
    parser = argparse.ArgumentParser(description="Airflow and MLflow on this machine, for Ratchet.")
    parser.add_argument("--home", type=Path, default=deployment.home())
    stack = Stack(parser.parse_args(arguments).home, say=lambda line: print(line, flush=True))
    with stopped_by_signals():
        try:
            stack.start()
            print(f"Airflow {stack.airflow_url} (user {USER}, password {stack.password})\nMLflow  {stack.mlflow_url}\n"
                  "Ctrl-C stops both.", flush=True)
            signal.pause()
        except KeyboardInterrupt:
            print("Stopping", flush=True)
        except (FaultError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 3
        finally:
            stack.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
