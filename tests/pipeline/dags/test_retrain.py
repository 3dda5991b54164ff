"""`land_prompts` and `retrain` under the real scheduler: by the asset, by the clock, and with nothing to do."""

import json

import pytest

from engine.errors import FaultError
from tasks import landing, registry, retrain
from tests.pipeline.airflow_stack import Airflow

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def as_a_client(airflow, monkeypatch):
    """This process looks into the same registry and store as the tasks do."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", airflow.stack.mlflow_url)
    monkeypatch.setenv("RATCHET_STORE", str(airflow.home / "store"))
    airflow.plan({"scores": {"retrain__": 0.8}})


def drop(airflow, name, *prompts):
    """A writer puts a whole file below the watched prefix."""
    path = airflow.home / "inbox" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "1"}) + "\n" for prompt in prompts))


def look(airflow, run_id):
    run = airflow.api.trigger("land_prompts", {"settle_s": 0}, run_id)
    return airflow.finished(run, "land_prompts")


def retrained(airflow, known=frozenset()):
    """Wait for the next run of `retrain` to end; its run id, its tasks' states and the run of `train_ppo` it chose."""
    run = airflow.wait(lambda: next(
        (r["dag_run_id"] for r in airflow.api.runs("retrain") if r["dag_run_id"] not in known), None))
    states = airflow.finished(run, "retrain")
    chosen = airflow.api.xcom("retrain", run, "choose")
    return run, states, chosen and chosen["run_id"]


def runs_of(airflow: Airflow, dag_id):
    return {run["dag_run_id"] for run in airflow.api.runs(dag_id)}


def sources(airflow, run_id):
    spec = json.loads((airflow.job(run_id, "prepare") / "spec.json").read_text())
    return spec["train"]["sources"]


def test_prompts_that_land_are_trained_on_from_the_champion_and_a_bad_file_is_reported(airflow):
    drop(airflow, "monday.jsonl", "1+1?", "2+2?")
    (airflow.home / "inbox" / "wrong.jsonl").write_text("no JSON\n")
    assert look(airflow, "look-1") == {"look": "skipped", "report": "skipped"}
    assert look(airflow, "look-2") == {"look": "success", "report": "failed"}
    assert "wrong.jsonl: 1 of 1 rows are bad" in airflow.api.log("land_prompts", "look-2", "report")

    run, states, training = retrained(airflow)
    assert run.startswith("asset_triggered__") and set(states.values()) == {"success"}
    assert airflow.api.run("train_ppo", training)["state"] == "success"
    generated, landed = sources(airflow, training)
    assert generated["task"] == "chain_sum" and landed["kind"] == "file"
    assert landed["uri"].startswith(str(airflow.home / "store/prompts/landed/"))
    assert landed["uri"].endswith("/monday.jsonl")
    assert "with 1 landed files" in airflow.api.run("train_ppo", training)["note"]
    made = airflow.api.xcom("train_ppo", training, "register")
    assert airflow.api.xcom("retrain", run, "record") == {
        "run_id": training, "candidate": f"retrained/{made['version']}"}
    airflow.finished(airflow.review_of(training), "review_candidate")
    champion = registry.read("retrained", registry.CHAMPION)
    assert champion.version == made["version"]

    known = runs_of(airflow, "retrain")
    drop(airflow, "tuesday.jsonl", "3+3?")
    look(airflow, "look-3")
    assert look(airflow, "look-4") == {"look": "success", "report": "success"}
    _, states, training = retrained(airflow, known)
    assert set(states.values()) == {"success"}
    assert [source["uri"].rsplit("/", 1)[1] for source in sources(airflow, training)[1:]] == ["tuesday.jsonl"]
    assert json.loads((airflow.job(training, "prepare") / "spec.json").read_text())["tokenizer"] == champion.export_uri


def backfill(airflow, behaviour):
    def ask():
        try:
            return airflow.api.call("POST", "/backfills", {
                "dag_id": "retrain", "from_date": "2020-01-01T00:00:00Z", "to_date": "2022-01-02T00:00:00Z",
                "reprocess_behavior": behaviour, "max_active_runs": 3, "dag_run_conf": {}})
        except FaultError as error:
            # Airflow takes no backfill on SQLite while another process writes to it.
            assert "503" in str(error)
            return None

    asked = airflow.wait(ask)
    airflow.wait(lambda: airflow.api.call("GET", f"/backfills/{asked['id']}")["completed_at"])
    return [run for run in airflow.api.runs("retrain") if run["run_type"] == "backfill"]


def test_a_backfill_of_three_ticks_done_twice_trains_once(airflow):
    land_quietly(airflow, "backfilled.jsonl")
    before = runs_of(airflow, "train_ppo")
    done = backfill(airflow, "none")
    assert len(done) == 3 and {run["state"] for run in done} == {"success"}
    assert len(backfill(airflow, "completed")) == 3
    [training] = runs_of(airflow, "train_ppo") - before
    assert sources(airflow, training)[-1]["uri"].endswith("/backfilled.jsonl")
    for run in done:
        choose = airflow.api.tasks("retrain", run["dag_run_id"])["choose"]
        assert (choose["state"], choose["try_number"]) == ("skipped", 2)
    assert "nothing new for retrained: " in airflow.api.log("retrain", done[0]["dag_run_id"], "choose", attempt=2)


def test_nothing_starts_while_another_training_is_active(airflow):
    land_quietly(airflow, "waiting.jsonl")
    airflow.plan({"busy/prepare": [{"seconds": 600}]})
    busy = airflow.api.trigger("train_ppo", {"preset": "tiny"}, "busy")
    airflow.wait((airflow.job(busy, "prepare") / "started").exists)
    before = len(retrain.read_trainings())
    run = airflow.api.trigger("retrain", {})
    assert set(airflow.finished(run, "retrain").values()) == {"skipped"}
    assert "1 runs of train_ppo are active" in airflow.api.log("retrain", run, "choose")
    assert len(retrain.read_trainings()) == before
    airflow.api.set_state("train_ppo", busy, "prepare", "failed")
    airflow.finished(busy)


def land_quietly(airflow, name):
    """A file that has landed without its event having started a retraining."""
    drop(airflow, name, name)
    path = airflow.home / "inbox" / name
    stat = path.stat()
    seen = landing.Seen(bytes=stat.st_size, modified=stat.st_mtime, since=0.0)
    assert landing._take_in(str(path.parent), name, seen, "quiet").outcome == "landed"
