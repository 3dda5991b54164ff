"""The local stack: ports, privacy, what a stop leaves, what comes back after a death."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time

import pytest

from engine.errors import FaultError
from tasks import jobs, stack
from tasks.launchers import local
from tasks.launchers.processes import read_process
from tests.pipeline.tasks.test_jobs import prepare_to, wait_for


def test_a_port_in_use_is_passed_over():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = stack.free_port(port)
        assert port < found < port + 100
        assert stack.free_port(port, taken=found) > found


def test_no_free_port_is_one_sentence(monkeypatch):
    monkeypatch.setattr(socket.socket, "bind", lambda *a: (_ for _ in ()).throw(OSError("in use")))
    with pytest.raises(FaultError, match="no port from 8080 to 8179 is free"):
        stack.free_port(8080)


def test_only_one_stack_runs_in_a_home_and_secrets_are_private(tmp_path):
    first, second = stack.Stack(tmp_path), stack.Stack(tmp_path)
    first._prepare_home()
    lock = first._take_lock()
    with pytest.raises(FaultError, match="a stack runs in .* already"):
        second.start()
    lock.close()
    for name in ("secrets.json", "password.json"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700
    before = (tmp_path / "password.json").read_text()
    second._prepare_home()
    assert (tmp_path / "password.json").read_text() == before


FORGETFUL = """
import contextlib
import gc
import sqlite3

from airflow import settings
from airflow.utils.session import create_session
from sqlalchemy import text

settings.initialize()
with create_session() as session:
    session.execute(text("CREATE TABLE told (number INTEGER)"))
    session.execute(text("INSERT INTO told VALUES (1), (2)"))
gc.disable()
with create_session() as session:
    unread = session.execute(text("SELECT number FROM told"))
with contextlib.closing(sqlite3.connect(settings.engine.url.database)) as another, another:
    another.execute("INSERT INTO told VALUES (3)")
with create_session() as session:
    print(session.scalars(text("SELECT count(*) FROM told")).one())
    session.execute(text("INSERT INTO told VALUES (4)"))
"""
"""What a backfill of Airflow 3.3 that reprocesses does: it executes a query and never reads its rows."""


def test_a_result_that_nobody_reads_does_not_keep_airflow_in_the_past(tmp_path):
    made = stack.Stack(tmp_path)
    made._prepare_home()
    made._choose_ports()
    done = subprocess.run([sys.executable, "-c", FORGETFUL], env=made.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3"]


def test_a_stop_ends_engine_jobs_too(deployment):
    deployment.plan({"t": [{"seconds": 600, "ignore_sigterm": True}]})
    directory = deployment.home / "jobs" / "d" / "r" / "t"
    jobs.submit(directory, prepare_to(deployment.home / "prompts"), local)
    stopped = stack.Stack(deployment.home)
    stopped.stop()
    assert jobs.running(deployment.home, local) == [directory], "not its home yet"
    stopped._prepare_home()
    stopped._lock = stopped._take_lock()
    stopped.stop()
    assert jobs.running(deployment.home, local) == [] and not local.mark_of(directory).processes()


def test_a_stop_ends_what_is_left_of_a_lost_job(deployment):
    deployment.plan({"t": [{"seconds": 600, "children": 1}]})
    directory = deployment.home / "jobs" / "d" / "r" / "t"
    jobs.submit(directory, prepare_to(deployment.home / "prompts"), local)
    wait_for((directory / "started").exists)
    os.kill(json.loads((directory / "job.json").read_text())["pid"], signal.SIGKILL)
    wait_for(lambda: len(local.mark_of(directory).processes()) == 1)
    stopped = stack.Stack(deployment.home)
    stopped._prepare_home()
    stopped._lock = stopped._take_lock()
    stopped.stop()
    assert not local.mark_of(directory).processes()


def test_a_component_that_cannot_be_started_is_tried_again_and_the_others_are_watched(deployment, monkeypatch):
    """A full disk."""
    said = []
    made = stack.Stack(deployment.home, say=said.append)
    made._prepare_home()
    made._choose_ports()
    first = made._launch("mlflow", ["true"])
    made._launch("api-server", ["true"])
    spawn, failures = made._spawn, [first]

    def full(component):
        if component in failures:
            raise OSError(28, "No space left on device")
        spawn(component)

    monkeypatch.setattr(made, "_spawn", full)
    monkeypatch.setattr(stack, "LONGEST_BACKOFF_S", 1.0)
    made._monitor.start()
    wait_for(lambda: "api-server ended with 0; starting it again" in said)
    wait_for(lambda: any("mlflow cannot be started: [Errno 28]" in line for line in said))
    failures.clear()
    wait_for(lambda: first.process is not None)
    made._stopping.set()
    made._monitor.join()
    made._end_components()


def test_a_start_ends_what_a_killed_stack_left_but_not_its_engine_jobs(deployment):
    deployment.plan({"t": [{"seconds": 600}]})
    directory = deployment.home / "jobs" / "d" / "r" / "t"
    jobs.submit(directory, prepare_to(deployment.home / "prompts"), local)
    killed = stack.Stack(deployment.home)
    killed._prepare_home()
    killed._choose_ports()
    killed._launch("scheduler", ["sleep", "600"])
    # Another title and environment, as Airflow's servers have: only the record finds it.
    killed._extra = {stack.STACK_VARIABLE: "elsewhere"}
    killed._launch("api-server", ["sleep", "600"])
    assert len(killed.processes()) == 2
    stack.Stack(deployment.home)._end_components()
    assert killed.processes() == set()
    assert jobs.state_of(directory, local).phase == "running"


TASK = """
import os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
engine = subprocess.Popen(sleep, start_new_session=True, env=os.environ | {"RATCHET_JOB_DIR": "anywhere"})
worker = subprocess.Popen(sleep)
open(sys.argv[1] + ".part", "w").write(f"{engine.pid} {worker.pid}")
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(600)
"""
"""A component with a child that is an engine job and one that is not."""


@pytest.fixture
def component(deployment):
    """A stack whose scheduler is such a component, the component, its engine, its other child."""
    made = stack.Stack(deployment.home, say=lambda line: None)
    made._prepare_home()
    made._choose_ports()
    pids = deployment.home / "pids"
    launched = made._launch("scheduler", [stack.sys.executable, "-c", TASK, str(pids)])
    wait_for(pids.exists)
    engine, worker = map(int, pids.read_text().split())
    yield made, launched, engine, worker
    os.kill(engine, signal.SIGKILL)
    made._end_components()


def alive(pid):
    process = read_process(pid)
    return process is not None and process.state not in "ZX"


def test_ending_a_component_spares_the_engine_jobs_that_its_tasks_started(component):
    made, launched, engine, worker = component
    assert made.processes() == {launched.process.pid, worker}
    made._end_components()
    assert alive(engine) and not alive(worker)


def test_what_a_dead_component_left_is_ended_before_it_starts_again(component):
    made, launched, engine, worker = component
    dead = launched.process
    dead.kill()
    dead.wait()
    wait_for(lambda: made._revive(launched) or launched.process not in (None, dead))
    assert alive(engine) and not alive(worker) and alive(launched.process.pid)


def test_deaths_count_in_a_row_only(component):
    made, launched, *_ = component
    delays = []
    for lived_s in (1, 1, 1, stack.STEADY_S + 1, 1):
        launched.process.kill()
        launched.process.wait()
        now = stack.time.monotonic()
        launched.started_at = now - lived_s
        made._revive(launched)
        delays.append(launched.restart_at - now)
        launched.restart_at = 0.0
        made._revive(launched)
    assert delays == pytest.approx([0.5, 1, 2, 0.5, 1], abs=0.24)


def test_the_client_listens_to_signals_as_to_ctrl_c():
    with stack.stopped_by_signals(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.slow
def test_everything_listens_on_this_machine_only(airflow):
    listening = set()
    for line in open("/proc/net/tcp").readlines()[1:] + open("/proc/net/tcp6").readlines()[1:]:
        fields = line.split()
        if fields[3] == "0A":
            listening.add((fields[1].split(":")[0], int(fields[9])))
    ours = set()
    for pid in airflow.stack.processes():
        for descriptor in os.scandir(f"/proc/{pid}/fd"):
            target = os.readlink(descriptor.path) if os.path.lexists(descriptor.path) else ""
            if target.startswith("socket:["):
                ours.add(int(target[8:-1]))
    addresses = {address for address, inode in listening if inode in ours}
    assert addresses == {"0100007F"}


@pytest.mark.slow
def test_a_dead_api_server_is_started_again_and_the_run_goes_on(airflow):
    airflow.plan({"outage/stage_1.train": [{"seconds": 20}]})
    run = airflow.api.trigger("train_ppo", {"preset": "tiny", "stages": 1}, "outage")
    airflow.wait((airflow.job(run, "stage_1.train") / "started").exists)
    dead = airflow.stack.pid_of("api-server")
    os.kill(dead, signal.SIGKILL)
    airflow.wait(lambda: not os.path.exists(f"/proc/{dead}"))
    airflow.wait(lambda: stack.answers(f"{airflow.stack.airflow_url}/api/v2/version"))
    assert airflow.finished(run)["register"] == "success"
    assert airflow.api.tasks("train_ppo", run)["stage_1.train"]["try_number"] == 1


def test_the_command_line_says_what_is_wrong_and_ends(tmp_path):
    (tmp_path / "home").write_text("a file")
    done = subprocess.run([stack.sys.executable, "-m", "tasks.stack", "--home", str(tmp_path / "home")],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 3
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and str(tmp_path / "home") in done.stderr
