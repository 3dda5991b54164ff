"""`train_ppo` and `review_candidate` under the real scheduler, MLflow and registry; only the engine is a stand-in."""

import json
import os

import pytest

from tasks import registry
from tasks.launchers import local

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def as_a_client(airflow, monkeypatch):
    """This process asks the same registry as the tasks do."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", airflow.stack.mlflow_url)


def started(airflow, run_id, task_id):
    airflow.wait((airflow.job(run_id, task_id) / "started").exists)


@pytest.fixture(scope="module")
def good(airflow):
    """A run of two stages, and the review that makes its candidate the champion; the ids of both runs."""
    airflow.plan({"scores": {"good/stage_1": 0.3, "good/stage_2": 0.8}})
    run = airflow.api.trigger("train_ppo", {"preset": "tiny"}, "good")
    airflow.finished(run)
    review = airflow.review_of(run)
    airflow.finished(review, "review_candidate")
    return run, review


def test_a_run_trains_its_stages_skips_the_rest_and_its_candidate_is_promoted(airflow, good):
    run, review = good
    states = airflow.finished(run)
    done = [task for task, state in states.items() if state == "success"]
    assert sorted(done) == sorted([
        "begin", "prepare", "stage_1.train", "stage_1.evaluate", "stage_1.go_on", "stage_2.train", "stage_2.evaluate",
        "stage_2.go_on", "register", "report"])
    assert {states[f"stage_3.{task}"] for task in ("train", "evaluate")} == {"skipped"}
    made = airflow.api.xcom("train_ppo", run, "register")
    assert made["stage"] == 2

    assert airflow.finished(review, "review_candidate") == {
        "load": "success", "evaluate": "success", "gate": "success", "approve": "success", "promote": "success",
        "reject": "skipped", "review_again": "skipped"}
    promoted = registry.read("tiny", made["version"])
    assert promoted.export_uri.endswith("good/stage_2/export") and promoted.tags["ratchet.decided_by"] == "policy"
    assert promoted.status in ("champion", "replaced")  # a later test may have promoted another

    spec = json.loads((airflow.job(run, "stage_2.train") / "spec.json").read_text())
    assert spec["resume_from"].endswith("good/stage_1/checkpoints")
    first = json.loads((airflow.job(run, "stage_1.train") / "spec.json").read_text())
    assert first["resume_from"] is None and first["tracking"]["run_id"] != spec["tracking"]["run_id"]
    assert first["tracking"]["parent_run_id"] == spec["tracking"]["parent_run_id"]


def test_what_travels_between_tasks_is_small(airflow, good):
    for dag_id, run in zip(("train_ppo", "review_candidate"), good, strict=True):
        sizes = {task: len(json.dumps(airflow.api.xcom(dag_id, run, task))) for task in airflow.api.tasks(dag_id, run)}
        assert 100 < max(sizes.values()) < 4096, sizes


def test_a_stage_without_progress_ends_the_training_and_the_gate_rejects_with_a_reason(airflow, good):
    airflow.plan({"scores": {"flat/stage_1": 0.1, "good/stage_2": 0.8}})
    run = airflow.api.trigger(
        "train_ppo", {"preset": "tiny", "override": "stages: {count: 3, min_improvement: 0.2}"}, "flat")
    states = airflow.finished(run)
    assert states["stage_1.evaluate"] == states["register"] == "success"
    assert {states[f"stage_{k}.{task}"] for k in (2, 3) for task in ("train", "evaluate")} == {"skipped"}
    assert "changed mean_reward by +0.1" in airflow.api.xcom("train_ppo", run, "stage_1.go_on")

    review = airflow.review_of(run)
    states = airflow.finished(review, "review_candidate")
    assert (states["gate"], states["approve"], states["promote"], states["reject"]) == (
        "success", "skipped", "skipped", "success")
    made = airflow.api.xcom("train_ppo", run, "register")
    rejected = registry.read("tiny", made["version"])
    assert rejected.tags["ratchet.status"] == "rejected" and "mean_reward" in rejected.tags["ratchet.reason"]
    assert registry.read("tiny", registry.CHAMPION).version != made["version"]


def test_a_person_approves_or_rejects_and_is_named(airflow):
    for run_id, answer, status in (("ask-1", "Reject", "rejected"), ("ask-2", "Approve", "champion")):
        airflow.plan({"scores": {f"{run_id}/stage_1": 0.95, "good/stage_2": 0.5}})
        run = airflow.api.trigger("train_ppo", {"preset": "tiny", "stages": 1, "approval": "human"}, run_id)
        airflow.finished(run)
        review = airflow.review_of(run)
        airflow.asked(review)
        airflow.api.answer("review_candidate", review, "approve", answer)
        airflow.finished(review, "review_candidate")
        version = registry.read("tiny", airflow.api.xcom("train_ppo", run, "register")["version"])
        assert version.status == status and version.tags["ratchet.decided_by"] == "admin"
        assert "by admin" in version.tags["ratchet.reason"]


@pytest.mark.parametrize(("code", "tries", "state"), [(3, 2, "success"), (2, 1, "failed"), (4, 1, "failed")])
def test_a_fault_is_tried_again_a_refusal_and_bad_numerics_are_not(airflow, code, tries, state):
    run_id = f"exit-{code}"
    airflow.plan({f"{run_id}/stage_1.train": [{"exit": code, "say": ["the last words"]}, {}]})
    run = airflow.api.trigger("train_ppo", {"preset": "tiny", "stages": 1}, run_id)
    states = airflow.finished(run)
    train = airflow.api.tasks("train_ppo", run)["stage_1.train"]
    assert (train["state"], train["try_number"]) == (state, tries)
    log = airflow.api.log("train_ppo", run, "stage_1.train")
    assert "the last words" in log and "error: train: the plan says so" in log
    assert states["register"] == ("success" if state == "success" else "upstream_failed")


def test_faults_after_progress_use_up_no_retry(airflow):
    """Attempts 1 and 2 get further each; 3 and 4 do not, so Airflow waits and counts before the next one."""
    airflow.plan({"further/stage_1.train": [
        {"exit": 3, "iteration": 1}, {"signal": 9, "iteration": 2}, {"exit": 3, "iteration": 2}, {"exit": 3}, {}]})
    run = airflow.api.trigger("train_ppo", {"preset": "tiny", "stages": 1}, "further")
    assert airflow.finished(run)["stage_1.train"] == "success"
    assert (airflow.job(run, "stage_1.train") / "attempt").read_text().strip() == "5"
    assert airflow.api.tasks("train_ppo", run)["stage_1.train"]["try_number"] == 3
    log = airflow.api.log("train_ppo", run, "stage_1.train")
    assert "ended by signal 9" in log and log.count("so the next one begins") == 2


def test_the_last_words_of_an_engine_that_was_killed_are_in_the_task_log(airflow):
    airflow.plan({"killed/prepare": [{"half_line": "half a line", "signal": 9}, {"exit": 2}]})
    run = airflow.api.trigger("train_ppo", {"preset": "tiny", "stages": 1}, "killed")
    airflow.finished(run)
    log = airflow.api.log("train_ppo", run, "prepare")
    assert "half a line" in log and "ended by signal 9" in log


@pytest.mark.parametrize("action", ["fail the task", "clear the task", "fail the run"])
def test_what_a_person_stops_leaves_no_engine_process(airflow, action):
    run_id = action.replace(" ", "-")
    airflow.plan({f"{run_id}/stage_1.train": [{"seconds": 600, "ignore_sigterm": True, "children": 2}, {}]})
    run = airflow.api.trigger("train_ppo", {"preset": "tiny", "stages": 1}, run_id)
    started(airflow, run, "stage_1.train")
    directory = airflow.job(run, "stage_1.train")
    engine = local.mark_of(directory).processes()
    assert len(engine) == 4
    if action == "fail the task":
        airflow.api.set_state("train_ppo", run, "stage_1.train", "failed")
    elif action == "clear the task":
        airflow.api.clear("train_ppo", run, ["stage_1.train"])
    else:
        airflow.api.call("PATCH", f"/dags/train_ppo/dagRuns/{run}", {"state": "failed"})
    # Airflow notices at the task's next heartbeat (2 s here); from then on there are 5 s.
    airflow.wait(lambda: not engine & local.mark_of(directory).processes(), seconds=12)
    assert airflow.finished(run)["stage_1.train"] == ("success" if action == "clear the task" else "failed")
    ended = directory / "attempts" / "1" if action == "clear the task" else directory
    assert json.loads((ended / "exit.json").read_text())["code"] == 130


def test_a_task_whose_worker_died_takes_over_the_job_it_left_running(airflow):
    airflow.plan({"orphan/stage_1.train": [{"seconds": 25}]})
    run = airflow.api.trigger("train_ppo", {"preset": "tiny", "stages": 1}, "orphan")
    started(airflow, run, "stage_1.train")
    pid = airflow.api.tasks("train_ppo", run)["stage_1.train"]["pid"]
    os.kill(pid, 9)
    assert airflow.finished(run)["stage_1.train"] == "success"
    assert airflow.api.tasks("train_ppo", run)["stage_1.train"]["try_number"] == 2
    directory = airflow.job(run, "stage_1.train")
    assert json.loads((directory / "job.json").read_text())["attempt"] == 1 and not (directory / "attempts").exists()


def test_clearing_a_finished_stage_returns_its_result_without_another_job(airflow, good):
    run, _ = good
    airflow.plan({"scores": {"good/stage_1": 0.3, "good/stage_2": 0.8}})
    airflow.api.clear("train_ppo", run, ["stage_2.train"])
    airflow.wait(lambda: airflow.api.tasks("train_ppo", run)["stage_2.train"]["try_number"] == 2)
    airflow.finished(run)
    assert airflow.api.tasks("train_ppo", run)["stage_2.train"]["state"] == "success"
    assert not (airflow.job(run, "stage_2.train") / "attempts").exists()


@pytest.mark.parametrize(("conf", "said"), [
    ({"override": "train: {actor: {lr: fast}}"}, r"train.actor.lr: Input should be a valid number"),
    ({"override": "train: {learning_rate: 1}"}, r"train.learning_rate: Extra inputs are not permitted (got '1')"),
    ({"override": "train: {layout: {tp: 3}, prompts_per_iteration: 9}"},
     r"layout tp=3 does not divide 4 attention heads"),
    ({"model": "/no/such/model"}, r"model: /no/such/model is not a directory"),
])
def test_a_wrong_form_fails_before_anything_starts_and_says_what_is_wrong(airflow, conf, said):
    run = airflow.api.trigger("train_ppo", {"preset": "tiny", "stages": 1, **conf})
    states = airflow.finished(run)
    assert states["begin"] == "failed" and states["prepare"] == "upstream_failed"
    assert airflow.api.tasks("train_ppo", run)["begin"]["try_number"] == 1
    assert said in airflow.api.log("train_ppo", run, "begin")
    assert not airflow.job(run, "prepare").exists()
