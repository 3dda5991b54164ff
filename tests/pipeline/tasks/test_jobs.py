"""The job directory: submit, adopt, retry, kill, over the real launcher and wrapper."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from engine import store
from engine.errors import SpecError
from engine.spec import GeneratedSource, PrepareSpec, PromptSetSpec, hash_spec, parse_spec
from tasks import jobs
from tasks.launchers import local
from tasks.launchers.processes import identity, read_process, send
from tasks.launchers.wrapper import visible_devices
from tests.engine.s3_server import s3_server
from tests.pipeline.examples import train_section

PREPARE = PrepareSpec(
    tokenizer="/m", output="/o", max_prompt_tokens=9,
    train=PromptSetSpec(sources=[GeneratedSource(task="chain_sum", size=4)]),
    eval=PromptSetSpec(sources=[GeneratedSource(task="chain_sum", size=4, seed=1)]))


def prepare_to(output: Path, **changes) -> PrepareSpec:
    return PREPARE.model_copy(update={"output": str(output), **changes})


def wait_for(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s in vain"
        time.sleep(0.02)
    return value


def processes_of(directory):
    return local.mark_of(directory).processes()


def ended(directory):
    return wait_for(lambda: (state := jobs.state_of(directory, local)).phase != "running" and state)


def started(directory):
    wait_for((directory / "started").exists)


def test_a_job_directory_depends_on_run_and_task_and_never_collides(tmp_path):
    directory = jobs.job_directory(tmp_path, "train_ppo", "manual__2026-11-29T10:00:00+00:00", "stage_1.train")
    assert directory == jobs.job_directory(tmp_path, "train_ppo", "manual__2026-11-29T10:00:00+00:00", "stage_1.train")
    assert directory.relative_to(tmp_path / "jobs" / "train_ppo").parts[1] == "stage_1.train"
    ids = ["a/b", "a-b", "a:b", "a b", "../a", "..", ".a", "a", "a" * 250, "a" * 251, "a/" * 125, "a:" * 125]
    assert len({jobs.safe_name(name) for name in ids}) == len(ids)
    assert all("/" not in jobs.safe_name(n) and not jobs.safe_name(n).startswith(".") for n in ids)
    assert all(len(jobs.safe_name(n)) <= 255 for n in ids)
    assert jobs.job_directory(tmp_path, "d", "r", "t", 3).name == "3"


def test_a_job_runs_once_and_is_a_result_afterwards(deployment):
    directory = deployment.home / "jobs" / "d" / "r" / "t"
    spec = prepare_to(deployment.home / "prompts")
    first = jobs.submit(directory, spec, local)
    assert not first.adopted
    assert ended(directory) == jobs.JobState("done", attempt=1, exit_code=0)
    again = jobs.submit(directory, spec, local)
    assert again.adopted and again.state.phase == "done" and again.state.attempt == 1
    assert jobs.read_result(directory).outputs == {"prompts": str(deployment.home / "prompts")}
    assert (directory / "spec.sha256").read_text().strip() == hash_spec(spec)
    assert '{"event": "start"' in (directory / "log.txt").read_text()


def test_nobody_else_may_enter_a_job_directory(deployment):
    directory = deployment.home / "jobs" / "d" / "r" / "t"
    jobs.submit(directory, prepare_to(deployment.home / "prompts"), local)
    for path in (directory, *directory.parents[:3]):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path


def test_submitting_a_running_job_adopts_it_also_from_many_threads_at_once(deployment):
    directory = deployment.home / "jobs" / "d" / "r" / "t"
    deployment.plan({"t": [{"seconds": 1.5}]})
    found = []
    threads = [threading.Thread(target=lambda: found.append(
        jobs.submit(directory, prepare_to(deployment.home / "prompts"), local))) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(s.adopted for s in found) == [False, True, True, True, True]
    assert ended(directory).attempt == 1 and not (directory / "attempts").exists()


def test_another_spec_is_refused_and_the_changed_fields_are_named(deployment):
    directory = deployment.home / "jobs" / "d" / "r" / "t"
    spec = prepare_to(deployment.home / "prompts")
    jobs.submit(directory, spec, local)
    ended(directory)
    with pytest.raises(SpecError, match=r"max_prompt_tokens: 9 -> 10; .*force"):
        jobs.submit(directory, spec.model_copy(update={"max_prompt_tokens": 10}), local)
    other = spec.model_copy(update={"train": PromptSetSpec(sources=[GeneratedSource(task="chain_sum", size=5)])})
    with pytest.raises(SpecError, match=r"train\.sources\[0\]\.size: 4 -> 5"):
        jobs.submit(directory, other, local)
    assert jobs.state_of(directory, local).attempt == 1
    forced = jobs.submit(directory, other, local, force=True)
    assert not forced.adopted and ended(directory).attempt == 2
    assert json.loads((directory / "spec.json").read_text())["train"]["sources"][0]["size"] == 5


def test_forcing_another_spec_ends_the_running_job_first(deployment):
    directory = deployment.home / "jobs" / "d" / "r" / "t"
    deployment.plan({"t": [{"seconds": 600}, {}]})
    spec = prepare_to(deployment.home / "prompts")
    jobs.submit(directory, spec, local)
    started(directory)
    old = processes_of(directory)
    jobs.submit(directory, spec.model_copy(update={"max_prompt_tokens": 10}), local, force=True)
    assert old and not any(Path(f"/proc/{pid}").exists() and pid in processes_of(directory) for pid in old)
    assert ended(directory).phase == "done"


def test_nothing_of_the_replaced_job_is_gone_on_from(deployment):
    checkpoints = deployment.home / "store" / "checkpoints"
    train = parse_spec({"stage": "train", "model": "/m", "prompts": "/p", "checkpoint_dir": str(checkpoints),
                        "export_dir": str(deployment.home / "e"), **train_section()})
    directory = deployment.home / "jobs" / "d" / "r" / "t"
    jobs.submit(directory, train, local)
    ended(directory)
    (checkpoints / "step-000001").mkdir(parents=True)
    (checkpoints / "step-000001" / "manifest.json").write_text("{}")
    (directory / "metrics.jsonl").write_text("1\n")
    jobs.submit(directory, train, local)
    assert checkpoints.exists() and (directory / "metrics.jsonl").exists()
    jobs.submit(directory, train.model_copy(update={"seed": 12345}), local, force=True)
    assert ended(directory).phase == "done"
    assert not checkpoints.exists() and not (directory / "metrics.jsonl").exists()
    assert (directory / "attempts" / "1" / "metrics.jsonl").read_text() == "1\n"
    assert (checkpoints.parent / "checkpoints.1" / "step-000001" / "manifest.json").exists()


@pytest.mark.parametrize("force", [True, False])
def test_checkpoints_in_an_object_store_are_deleted_when_asked_and_local_copies_put_aside(
        deployment, monkeypatch, force):
    ours, theirs = "s3://bucket/run/checkpoints", "s3://bucket/other/checkpoints"
    train = parse_spec({"stage": "train", "model": "s3://bucket/m", "prompts": "/p", "checkpoint_dir": ours,
                        "export_dir": str(deployment.home / "e"), **train_section()})
    directory = deployment.home / "jobs" / "d" / "r" / "t"
    deployment.plan({"t": [{"exit": 2}, {"exit": 2}, {}]})
    with s3_server(monkeypatch):
        for uri in (ours, theirs):
            store.write_bytes(f"{uri}/step-000001/manifest.json", "{}")
        jobs.submit(directory, train, local)
        ended(directory)
        for name in ("checkpoints/step-000001", "resumed/step-000007", "model", "export"):
            store.write_bytes(directory / name / "file", "old")
        jobs.submit(directory, train.model_copy(update={"seed": 12345}), local, force=force)
        ended(directory)
        assert store.exists(ours) is not force
        for name in ("checkpoints/step-000001", "resumed/step-000007", "model", "export"):
            assert (directory / "attempts" / "1" / name / "file").exists() and not (directory / name).exists()
        jobs.submit(directory, train.model_copy(update={"checkpoint_dir": theirs}), local, force=True)
        assert ended(directory).phase == "done" and store.exists(theirs)


def test_a_job_that_was_refused_may_come_back_with_a_mended_spec(deployment):
    directory = deployment.home / "jobs" / "d" / "r" / "t"
    deployment.plan({"t": [{"exit": 2}, {}]})
    spec = prepare_to(deployment.home / "prompts")
    jobs.submit(directory, spec, local)
    assert ended(directory).exit_code == 2
    jobs.submit(directory, spec.model_copy(update={"max_prompt_tokens": 10}), local)
    assert ended(directory) == jobs.JobState("done", attempt=2, exit_code=0)


@pytest.mark.parametrize(("behaviour", "code", "signum"), [
    ({"exit": 3}, 3, None), ({"exit": 4}, 4, None), ({"signal": signal.SIGKILL}, 137, 9), ({"torn": True}, 3, None)])
def test_a_failed_job_gets_a_new_attempt_and_keeps_the_old_ones_files(deployment, behaviour, code, signum):
    directory = deployment.home / "jobs" / "d" / "r" / "t"
    deployment.plan({"t": [behaviour, {}]})
    spec = prepare_to(deployment.home / "prompts")
    jobs.submit(directory, spec, local)
    assert ended(directory) == jobs.JobState("failed", attempt=1, exit_code=code, signal=signum)
    assert not jobs.submit(directory, spec, local).adopted
    assert ended(directory) == jobs.JobState("done", attempt=2, exit_code=0)
    assert json.loads((directory / "attempts" / "1" / "exit.json").read_text())["code"] in (code, 0)
    assert (directory / "attempts" / "1" / "log.txt").exists()


def test_an_attempt_got_further_when_it_completed_what_none_before_it_had(deployment):
    directory = deployment.home / "jobs" / "d" / "r" / "t"
    assert not jobs.got_further(directory)
    found = []
    deployment.plan({"t": [{"exit": 3, "iteration": reached} for reached in (0, 2, 2, 1, 3)]})
    for _ in range(5):
        jobs.submit(directory, prepare_to(deployment.home / "prompts"), local)
        ended(directory)
        found.append(jobs.got_further(directory))
    assert found == [False, True, False, False, True]


def test_an_interpreter_that_does_not_start_ends_the_job_with_a_reason(deployment, monkeypatch):
    broken = deployment.home / "broken"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    monkeypatch.setenv("RATCHET_ENGINE_PYTHON", str(broken))
    directory = deployment.home / "jobs" / "d" / "r" / "t"
    jobs.submit(directory, prepare_to(deployment.home / "prompts"), local)
    assert ended(directory).exit_code == 3
    assert f"error: cannot start {broken}" in (directory / "log.txt").read_text()


@pytest.mark.parametrize("behaviour", [
    {"seconds": 600}, {"seconds": 600, "ignore_sigterm": True},
    {"seconds": 600, "ignore_sigterm": True, "children": 3}])
def test_a_kill_leaves_no_process_within_five_seconds(deployment, behaviour):
    directory = deployment.home / "jobs" / "d" / "r" / "t"
    deployment.plan({"t": [behaviour, {}]})
    spec = prepare_to(deployment.home / "prompts")
    jobs.submit(directory, spec, local)
    started(directory)
    assert len(processes_of(directory)) == 2 + behaviour.get("children", 0)
    begin = time.monotonic()
    jobs.kill(directory, local)
    assert processes_of(directory) == set()
    assert time.monotonic() - begin < 5
    state = jobs.state_of(directory, local)
    assert (state.phase, state.exit_code) == ("failed", 130)
    jobs.submit(directory, spec, local)
    assert ended(directory).phase == "done"


def test_killing_a_finished_job_changes_nothing(deployment):
    directory = deployment.home / "jobs" / "d" / "r" / "t"
    jobs.submit(directory, prepare_to(deployment.home / "prompts"), local)
    before = ended(directory)
    jobs.kill(directory, local)
    assert jobs.state_of(directory, local) == before


def test_a_dead_wrapper_is_a_lost_job_whose_engine_is_ended_before_the_next_attempt(deployment):
    directory = deployment.home / "jobs" / "d" / "r" / "t"
    deployment.plan({"t": [{"seconds": 600, "ignore_sigterm": True, "children": 1}, {}]})
    spec = prepare_to(deployment.home / "prompts")
    jobs.submit(directory, spec, local)
    started(directory)
    os.kill(json.loads((directory / "job.json").read_text())["pid"], signal.SIGKILL)
    wait_for(lambda: jobs.state_of(directory, local).phase == "lost")
    orphans = processes_of(directory)
    assert orphans
    jobs.submit(directory, spec, local)
    assert not orphans & processes_of(directory)
    assert ended(directory) == jobs.JobState("done", attempt=2, exit_code=0)


def test_a_job_whose_record_was_never_read_is_adopted_after_the_submitter_died(deployment):
    directory = deployment.home / "jobs" / "d" / "r" / "t"
    deployment.plan({"t": [{"seconds": 2}]})
    spec = prepare_to(deployment.home / "prompts")
    submitter = os.fork()
    if submitter == 0:
        jobs.submit(directory, spec, local)
        os._exit(0)
    os.waitpid(submitter, 0)
    assert jobs.submit(directory, spec, local).adopted
    assert ended(directory) == jobs.JobState("done", attempt=1, exit_code=0)


def test_a_process_that_only_has_the_same_number_is_not_the_job(deployment):
    directory = deployment.home / "jobs" / "d" / "r" / "t"
    deployment.plan({"t": [{"seconds": 600}]})
    jobs.submit(directory, prepare_to(deployment.home / "prompts"), local)
    record = json.loads((directory / "job.json").read_text())
    assert local.alive(directory, record)
    assert not local.alive(directory, {**record, "start_ticks": record["start_ticks"] + 1})
    assert not local.alive(directory, {**record, "boot": "another"})


LEADER = "import subprocess, sys; print(subprocess.Popen(['sleep', '600'], cwd=sys.argv[1], stdout=sys.stderr).pid)"


@pytest.mark.parametrize("ours", [True, False])
def test_a_dead_wrappers_session_is_ended_if_it_is_the_jobs_and_not_another_of_its_number(ours, tmp_path):
    leader = subprocess.Popen([sys.executable, "-c", LEADER, str(tmp_path if ours else "/")], stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, start_new_session=True)
    record = identity(leader.pid) | {"host": socket.gethostname()}
    (tmp_path / "job.json").write_text(json.dumps(record))
    left = int(leader.communicate()[0])
    local.kill(tmp_path)
    alive = read_process(left)
    assert (alive is None or alive.state in "ZX") == ours
    if not ours:
        os.kill(left, signal.SIGKILL)


def test_a_process_that_may_not_be_ended_keeps_no_other_from_it(monkeypatch):
    sleeper = subprocess.Popen(["sleep", "600"])
    kill = os.kill

    def kill_own(pid, signum):
        if pid != sleeper.pid:
            raise PermissionError
        kill(pid, signum)

    monkeypatch.setattr(os, "kill", kill_own)
    send({1, sleeper.pid, 2}, signal.SIGKILL)
    assert sleeper.wait(timeout=20) == -signal.SIGKILL


def test_two_jobs_never_share_a_slot_and_prepare_needs_none(deployment):
    train = parse_spec({"stage": "train", "model": "/m", "prompts": "/p", "checkpoint_dir": str(deployment.home / "c"),
                        "export_dir": str(deployment.home / "e"), **train_section()})
    first, second, third = (deployment.home / "jobs" / "d" / "r" / name for name in ("one", "two", "three"))
    deployment.plan({"one": [{"seconds": 2}]})
    jobs.submit(first, train, local)
    started(first)
    jobs.submit(second, train, local)
    jobs.submit(third, prepare_to(deployment.home / "prompts"), local)
    assert ended(third).phase == "done"
    assert jobs.state_of(first, local).phase == "running" and not (second / "started").exists()
    wait_for(lambda: (second / "log.txt").exists() and '"waiting"' in (second / "log.txt").read_text())
    assert ended(first).phase == "done" and ended(second).phase == "done"


def test_a_job_waiting_for_a_slot_can_be_killed(deployment):
    train = parse_spec({"stage": "train", "model": "/m", "prompts": "/p", "checkpoint_dir": str(deployment.home / "c"),
                        "export_dir": str(deployment.home / "e"), **train_section()})
    first, second = (deployment.home / "jobs" / "d" / "r" / name for name in ("one", "two"))
    deployment.plan({"one": [{"seconds": 600}]})
    jobs.submit(first, train, local)
    started(first)
    jobs.submit(second, train, local)
    wait_for(lambda: (second / "log.txt").exists() and '"waiting"' in (second / "log.txt").read_text())
    jobs.kill(second, local)
    assert jobs.state_of(second, local).exit_code == 130 and jobs.state_of(first, local).phase == "running"


def test_gpus_are_leased_by_number_and_more_than_there_are_is_refused(deployment, monkeypatch):
    monkeypatch.setenv("RATCHET_GPUS", "2")
    paths, need, gpus = local.slots_for("train", 2)
    assert [Path(p).name for p in paths] == ["gpu-0.lock", "gpu-1.lock"] and need == 2 and gpus
    with pytest.raises(SpecError, match="needs 4 GPUs but this machine has RATCHET_GPUS=2"):
        local.slots_for("train", 4)


def test_hosts_that_share_a_home_lease_their_own_gpus(deployment, monkeypatch):
    monkeypatch.setenv("RATCHET_GPUS", "8")
    here = local.slots_for("train", 8)[0]
    assert local.slots_for("train", 8)[0] == here
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert not set(local.slots_for("train", 8)[0]) & set(here)


def test_leased_gpus_are_those_that_the_worker_may_see():
    assert visible_devices([0, 1], None) == visible_devices([0, 1], "") == "0,1"
    assert visible_devices([0, 2], "2,3, 5") == "2,5"
    assert visible_devices([1], "GPU-8f2a,MIG-77") == "MIG-77"


def environment_of_a_job(deployment):
    """What the wrapper and the engine of a job have in their environments."""
    directory = deployment.home / "jobs" / "d" / "r" / "t"
    deployment.plan({"t": [{"seconds": 600}]})
    jobs.submit(directory, prepare_to(deployment.home / "prompts"), local)
    started(directory)
    return b"\0".join(Path(f"/proc/{pid}/environ").read_bytes() for pid in processes_of(directory)).decode()


def test_the_engine_gets_no_secret_but_those_it_needs(deployment, monkeypatch):
    for name in ("AIRFLOW__DATABASE__SQL_ALCHEMY_CONN", "AIRFLOW_CONN_AWS", "DATABASE_URL", "MLFLOW_BACKEND_STORE_URI",
                 "MLFLOW_WEBHOOK_SECRET_ENCRYPTION_KEY", "RATCHET_MLFLOW_URL", "RATCHET_STACK", "SLACK_WEBHOOK_URL",
                 "GOOGLE_APPLICATION_CREDENTIALS", "AZURE_CLIENT_SECRET", "OPENAI_API_KEY", "MY_AWS_KEY"):
        monkeypatch.setenv(name, "canary")
    needed = ("AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "MLFLOW_TRACKING_PASSWORD", "RATCHET_JUDGE_KEY",
              "https_proxy", "CUDA_HOME", "NCCL_DEBUG", "VLLM_LOGGING_LEVEL")
    for name in needed:
        monkeypatch.setenv(name, "wanted")
    given = environment_of_a_job(deployment)
    assert "canary" not in given
    assert all(f"{name}=wanted" in given for name in needed)


def test_a_deployment_names_further_variables_for_the_engine(deployment, monkeypatch):
    monkeypatch.setenv("RATCHET_ENGINE_ENV", "RATCHET_FAKE_PLAN, MY_KEY,")
    monkeypatch.setenv("MY_KEY", "wanted")
    monkeypatch.setenv("MY_KEY_2", "canary")
    given = environment_of_a_job(deployment)
    assert "MY_KEY=wanted" in given and "canary" not in given


def test_running_jobs_are_found_by_looking_at_the_directories(deployment):
    deployment.plan({"long": [{"seconds": 600}]})
    for name in ("long", "short"):
        jobs.submit(deployment.home / "jobs" / "d" / "r" / name, prepare_to(deployment.home / name), local)
    ended(deployment.home / "jobs" / "d" / "r" / "short")
    assert [d.name for d in jobs.running(deployment.home, local)] == ["long"]
