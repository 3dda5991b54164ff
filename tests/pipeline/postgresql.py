"""A PostgreSQL server for tests: a new cluster in a temporary directory, 127.0.0.1, a password, nothing left behind."""

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.mlflow_server import free_port

USER = "ratchet"
START_LIMIT_S = 60.0


class Unavailable(RuntimeError):
    """PostgreSQL's server cannot run here; says what to install."""


def server_programs() -> Path | None:
    """The directory of `initdb` and `postgres`, newest version; None when they are not installed."""
    # Debian keeps them away from PATH, a directory a version.
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parent.name))
    if found:
        return found[-1]
    on_path = shutil.which("initdb")
    return Path(on_path).resolve().parent if on_path else None


def unprivileged() -> list[str] | None:
    """What to put before a command so that it does not run as root, which PostgreSQL refuses; None when impossible."""
    if os.geteuid() != 0:
        return []
    try:
        user = pwd.getpwnam("postgres")
    except KeyError:
        return None
    if shutil.which("setpriv") is None:
        return None
    return ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]


class PostgreSQL:
    """A running server."""

    def __init__(self, programs: Path, as_user: list[str], directory: Path):
        """Args: directory: empty, belongs to the user that the server runs as."""
        self.port, self._password = free_port(), secrets.token_urlsafe(16)
        password_file = directory / "password"
        self._run([*as_user, "sh", "-c", f'umask 077; printf %s "$PASSWORD" > "{password_file}"'], directory,
                  PASSWORD=self._password)
        self._run([*as_user, str(programs / "initdb"), "--pgdata", str(directory / "data"), "--username", USER,
                   "--auth", "scram-sha-256", "--pwfile", str(password_file), "--encoding", "UTF8", "--locale", "C",
                   "--no-sync"], directory)
        with open(directory / "log", "wb") as log:
            # setpriv becomes the server: its pid is the server's.
            self.process = subprocess.Popen(
                [*as_user, str(programs / "postgres"), "-D", str(directory / "data"), "-p", str(self.port),
                 "-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=", "-c", "fsync=off"],
                cwd=directory, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True)
        self._wait(directory / "log")

    def make_database(self, name: str) -> str:
        """Create a database; its SQLAlchemy URL."""
        with self.connect("postgres") as cursor:
            cursor.execute(f'CREATE DATABASE "{name}"')
        return f"postgresql+psycopg2://{USER}:{self._password}@127.0.0.1:{self.port}/{name}"

    @contextlib.contextmanager
    def connect(self, database: str) -> Iterator:
        """A cursor that commits every statement."""
        import psycopg2

        connection = psycopg2.connect(
            host="127.0.0.1", port=self.port, user=USER, password=self._password, dbname=database, connect_timeout=5)
        connection.autocommit = True
        try:
            with connection.cursor() as cursor:
                yield cursor
        finally:
            connection.close()

    def stop(self) -> None:
        """End the server and its children: SIGINT drops the connections."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _wait(self, log: Path) -> None:
        import psycopg2

        deadline = time.monotonic() + START_LIMIT_S
        while True:
            try:
                with self.connect("postgres"):
                    return
            except psycopg2.OperationalError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.process.kill()
                    raise RuntimeError(f"PostgreSQL did not start:\n{log.read_text()[-3000:]}") from None
                time.sleep(0.2)

    @staticmethod
    def _run(command: list[str], directory: Path, **environment: str) -> None:
        done = subprocess.run(command, cwd=directory, env={**os.environ, **environment}, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{command[-1]}: {done.stdout}{done.stderr}")


@contextlib.contextmanager
def running() -> Iterator[PostgreSQL]:
    """A server, as long as the block runs.

    Raises:
        Unavailable.
    """
    programs, as_user = server_programs(), unprivileged()
    if programs is None or as_user is None:
        raise Unavailable("PostgreSQL's server is not installed; Debian: apt-get install postgresql")
    # Not pytest's directory: only root may enter that one.
    directory = Path(tempfile.mkdtemp(prefix="ratchet-postgresql-"))
    try:
        if as_user:
            shutil.chown(directory, "postgres", "postgres")
        server = PostgreSQL(programs, as_user, directory)
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(directory)
