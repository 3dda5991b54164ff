"""Secrets of the stack's environment stay there: nothing that a run of the real pipeline writes holds one."""

import pytest

from tests.pipeline.chaos.conftest import CANARIES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run_id(stack):
    """A finished run."""
    runs = [run["dag_run_id"] for run in stack.api.runs("train_ppo") if run["state"] == "success"]
    if not runs:
        runs = [stack.api.trigger("train_ppo", {"preset": "real", "stages": 1}, "secrets")]
        assert set(stack.finished(runs[0], seconds=500).values()) == {"success", "skipped"}
    return runs[0]


def canaries_in(content: bytes | str) -> list[str]:
    text = content if isinstance(content, bytes) else content.encode()
    return [name for name, value in CANARIES.items() if value.encode() in text]


def test_the_stack_and_its_jobs_had_the_secrets(stack, run_id):
    # Airflow's own processes write their titles over theirs.
    environment = open(f"/proc/{stack.stack.pid_of('object-store')}/environ", "rb").read()
    assert canaries_in(environment) == list(CANARIES)
    # And they were needed: everything that the run keeps went through the object store.
    assert list((stack.home / "objects").glob("*manifest.json.object"))


def test_no_file_of_a_home_holds_a_secret(stack, run_id):
    """Job directories, specs, task logs, Airflow's database (XCom, rendered fields), MLflow's database and artifacts,
    every object of the store."""
    files = [path for path in stack.home.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"spec.json", "log.txt", "airflow.db", "mlflow.db", "report.html", "scheduler.log"} <= names
    assert "attempt=1.log" in names
    assert not {str(path): found for path in files if (found := canaries_in(path.read_bytes()))}


def test_the_api_shows_no_secret(stack, run_id):
    tasks = stack.api.tasks("train_ppo", run_id)
    for task, instance in tasks.items():
        shown = [instance, stack.api.xcom("train_ppo", run_id, task)]
        if instance["try_number"]:
            shown.append(stack.api.log("train_ppo", run_id, task, instance["try_number"]))
        assert not canaries_in(repr(shown)), task
    assert "rendered_fields" in tasks["stage_1.train"]
