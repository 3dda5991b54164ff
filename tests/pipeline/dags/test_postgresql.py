"""Airflow and MLflow on PostgreSQL: one training run, its review, housekeeping and lineage, as everywhere on SQLite.

And two schedulers, which Airflow supports only where rows can be locked.
"""

import pytest

from tasks import lineage, registry
from tasks.stack import Databases
from tests.pipeline import postgresql
from tests.pipeline.airflow_stack import Airflow
from tests.pipeline.conftest import write_engine


def test_where_it_cannot_run_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setattr(postgresql, "server_programs", lambda: None)
    with pytest.raises(postgresql.Unavailable, match="apt-get install postgresql"), postgresql.running():
        pass


@pytest.mark.slow
def test_a_model_is_trained_reviewed_and_promoted_on_postgresql(tmp_path, monkeypatch):
    try:
        with postgresql.running() as server:
            databases = Databases(server.make_database("airflow"), server.make_database("mlflow"))
            home = tmp_path / "home"
            home.mkdir()
            with Airflow(home, write_engine(tmp_path / "python"), databases) as airflow:
                train_review_and_look(airflow, server, monkeypatch)
                train_under_two_schedulers(airflow)
            assert not list(home.rglob("*.db")), "nothing is kept beside PostgreSQL"
    except postgresql.Unavailable as reason:
        pytest.skip(str(reason))


def train_review_and_look(airflow, server, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", airflow.stack.mlflow_url)
    monkeypatch.setenv("RATCHET_HOME", str(airflow.home))
    monkeypatch.setenv("RATCHET_STORE", str(airflow.home / "store"))
    rows = airflow.home / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    override = f"prepare: {{train: {{sources: [{{kind: file, uri: '{rows}'}}]}}}}"
    airflow.plan({"scores": {"stage_1": 0.8}})
    run = airflow.api.trigger("train_ppo", {"preset": "tiny", "stages": 1, "override": override}, "on-postgresql")
    assert airflow.finished(run)["register"] == "success"
    review = airflow.review_of(run)
    assert airflow.finished(review, "review_candidate")["promote"] == "success"
    champion = registry.read("tiny", registry.CHAMPION)
    assert champion.version == airflow.api.xcom("train_ppo", run, "register")["version"]

    look = airflow.api.trigger("housekeeping", {"keep_runs": 1, "keep_days": 1}, "dry")
    assert airflow.finished(look, "housekeeping") == {"look": "success", "delete": "skipped"}
    assert [s.label for s in lineage.seen_by(lineage.content_hash(str(rows)))] == [champion.label]

    with server.connect("airflow") as cursor:
        cursor.execute("SELECT dag_id, state FROM dag_run")
        assert set(cursor.fetchall()) >= {(dag, "success") for dag in ("train_ppo", "review_candidate", "housekeeping")}
    with server.connect("mlflow") as cursor:
        cursor.execute("SELECT alias, version FROM registered_model_aliases WHERE name = 'tiny'")
        assert cursor.fetchall() == [("champion", int(champion.version))]


def train_under_two_schedulers(airflow):
    with airflow.second_scheduler():
        run = airflow.api.trigger("train_ppo", {"preset": "tiny"}, "two-schedulers")
        assert airflow.finished(run)["register"] == "success"
    # PostgreSQL locks rows: not only the job, every task ran once.
    assert {ti["try_number"] for ti in airflow.api.tasks("train_ppo", run).values()} <= {0, 1}
    assert set(airflow.attempts(run).values()) == {1}
