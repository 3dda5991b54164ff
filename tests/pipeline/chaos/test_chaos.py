"""The tiny preset's pipeline, killed again and again, ends by itself and with the weights it would have had.

Real scheduler, API server, MLflow, engine, and an object store for everything it keeps. `make chaos KILLS=200 SEED=1`.
"""

import fcntl
import socket
import time
from collections import Counter

import pytest

from engine.errors import FaultError
from engine.spec import RunResult
from engine.store import MANIFEST, download_dir, exists, hash_model_dir, join
from tasks import jobs
from tasks.stack import answers
from tasks.tracking import mlflow_client
from tests.pipeline.chaos import killer
from tests.pipeline.chaos.conftest import CANARIES
from tests.pipeline.chaos.outage import away
from tests.pipeline.chaos.undisturbed import learned

STAGES = ("stage_1.train", "stage_2.train")
RUN_LIMIT_S = 3600.0
"""Of one run that is killed until it ends: about twenty times."""


@pytest.fixture(autouse=True)
def as_a_client(stack, monkeypatch):
    """This process reads the same registry and store as the tasks."""
    environment = stack.stack.environment()
    for name in ("MLFLOW_TRACKING_URI", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION", *CANARIES):
        monkeypatch.setenv(name, environment[name])


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_run_that_is_killed_twelve_times_ends_as_if_nothing_had_happened(stack, undisturbed, tmp_path):
    disturb(stack, undisturbed, tmp_path, killer.plan(seed=5, count=12), "twelve")


@pytest.mark.chaos
@pytest.mark.timeout(8 * 3600)
def test_runs_that_are_killed_at_every_moment_end_as_if_nothing_had_happened(stack, undisturbed, tmp_path):
    seed, count = killer.chosen("CHAOS_SEED", 1), killer.chosen("CHAOS_KILLS", 200)
    print(f"\nchaos: seed {seed}, {count} kills", flush=True)
    disturb(stack, undisturbed, tmp_path, killer.plan(seed, count), f"chaos-{seed}")


@pytest.mark.chaos
@pytest.mark.timeout(1500)
def test_two_minutes_without_an_api_server_in_mid_training_change_nothing(stack, undisturbed, tmp_path):
    wait_for_all(stack)
    run_id = stack.api.trigger("train_ppo", {"preset": "real"}, "away")
    stack.wait(lambda: '"ready"' in log_of(stack, run_id))
    with away(stack, "api-server", seconds=120):
        pass
    assert set(stack.finished(run_id, seconds=RUN_LIMIT_S).values()) == {"success", "skipped"}
    assert {ti["try_number"] for ti in stack.api.tasks("train_ppo", run_id).values()} <= {0, 1}
    check(stack, undisturbed, tmp_path / run_id, run_id)


@pytest.mark.chaos
@pytest.mark.timeout(1500)
def test_a_run_that_finds_no_free_slot_for_minutes_waits_and_uses_up_no_try(stack, undisturbed, tmp_path):
    wait_for_all(stack)
    slot = stack.home / "slots" / socket.gethostname() / "cpu-0.lock"
    slot.parent.mkdir(parents=True, exist_ok=True)
    with open(slot, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        run_id = stack.api.trigger("train_ppo", {"preset": "real"}, "without-a-slot")
        stack.wait(lambda: stack.api.tasks("train_ppo", run_id)[STAGES[0]]["state"] == "up_for_reschedule", 600)
    assert set(stack.finished(run_id, seconds=RUN_LIMIT_S).values()) == {"success", "skipped"}
    assert {ti["try_number"] for ti in stack.api.tasks("train_ppo", run_id).values()} <= {0, 1}
    check(stack, undisturbed, tmp_path / run_id, run_id)


def log_of(stack, run_id):
    path = stack.job(run_id, STAGES[0]) / "log.txt"
    return path.read_text() if path.exists() else ""


def disturb(stack, undisturbed, directory, kills, name):
    """Run after run until all kills are done; each has to be right."""
    killing = killer.Killer(stack, kills)
    begin, number = time.monotonic(), 0
    while killing.left:
        number += 1
        run_id = f"{name}-{number}"
        stack.api.trigger("train_ppo", {"preset": "real"}, run_id)
        with killing.disturbing(run_id):
            stack.wait(lambda run_id=run_id: ended(stack, run_id), RUN_LIMIT_S)
        wait_for_all(stack)
        tasks = stack.api.tasks("train_ppo", run_id)
        states, tries = ({task: ti[key] for task, ti in tasks.items()} for key in ("state", "try_number"))
        seconds = time.monotonic() - begin
        print(f"{run_id}: {dict(Counter(states.values()))}, {seconds:.0f} s so far, tries {tries}", flush=True)
        assert set(states.values()) == {"success", "skipped"}, states
        check(stack, undisturbed, directory / run_id, run_id)
    targets = Counter(line.split(": ")[1].split(" (")[0] for line in killing.done)
    print(f"{len(killing.done)} kills {dict(targets)} in {number} runs, {time.monotonic() - begin:.0f} s", flush=True)
    assert len(killing.done) == len(kills)


def wait_for_all(stack):
    """Until what the last kill ended is back: this process asks too."""
    environment = stack.stack.environment()
    for page in (f"{stack.stack.airflow_url}/api/v2/version", f"{stack.stack.mlflow_url}/health",
                 f"{environment['AWS_ENDPOINT_URL']}/moto-api/"):
        stack.wait(lambda page=page: answers(page))


def ended(stack, run_id):
    """Whether the run is over; nobody knows while the API server is dead."""
    try:
        return stack.api.run("train_ppo", run_id)["state"] in ("success", "failed")
    except FaultError:
        return False


def check(stack, undisturbed, directory, run_id):
    """The run is what the undisturbed one is, once, and nothing is left of how it came to be."""
    for task in STAGES:
        result = RunResult.model_validate_json((stack.job(run_id, task) / "result.json").read_text())
        assert result.hashes["weights"] == undisturbed.results[task].hashes["weights"], task
        assert learned(stack.job(run_id, task)) == undisturbed.metrics(task), task
        assert exists(join(result.outputs["checkpoint"], MANIFEST)), "the next stage, or a person, goes on from it"
    made = stack.api.xcom("train_ppo", run_id, "register")
    spec = jobs.read_json(stack.job(run_id, STAGES[-1]) / "spec.json")
    with mlflow_client() as client:
        versions = client.search_model_versions(f"name='chaos' and run_id='{spec['tracking']['parent_run_id']}'")
        assert [v.version for v in versions] == [made["version"]]
        for task in STAGES:
            check_metrics(client, stack.job(run_id, task))
    download_dir(spec["export_dir"], directory)
    assert hash_model_dir(directory) == undisturbed.results[STAGES[-1]].hashes["weights"]
    assert versions[0].tags["ratchet.weights_hash"] == hash_model_dir(directory)
    assert not killer.processes_left(stack.home) and not list(killer.still_held(stack.home))


def check_metrics(client, directory):
    """MLflow has every number of a stage's metrics.jsonl, once."""
    mlflow_run = jobs.read_json(directory / "spec.json")["tracking"]["run_id"]
    written = {}
    for step, metrics in learned(directory):
        for name, value in metrics.items():
            written.setdefault(name, []).append((step, value))
    for name, values in written.items():
        history = [(m.step, m.value) for m in client.get_metric_history(mlflow_run, name)]
        assert sorted(history) == values, f"{directory}: {name}"
