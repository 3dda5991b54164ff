"""What a person sees of a run under the real API server: links, note, tab, report; nothing of it without a login."""

import urllib.error
import urllib.request

import pytest

from tasks import registry
from tasks.tracking import mlflow_client

pytestmark = pytest.mark.slow
RUN = "shown"


@pytest.fixture(scope="module")
def shown(airflow):
    """A finished run and its review; its id."""
    airflow.plan({"scores": {f"{RUN}/stage_1": 0.9}, f"{RUN}/prepare": [{"say": ["words of <the> engine"]}]})
    run = airflow.api.trigger("train_ppo", {"preset": "tiny", "stages": 1, "algorithm": "grpo"}, RUN)
    assert airflow.finished(run)["report"] == "success"
    airflow.finished(airflow.review_of(run), "review_candidate")
    return run


def get(airflow, address, *, login=True):
    """Status, headers and text of a page, as the user `admin` or as nobody."""
    path = address.removeprefix(airflow.stack.airflow_url)
    if login and not airflow.api._token:
        airflow.api.call("GET", "/dags")
    headers = {"Authorization": f"Bearer {airflow.api._token}"} if login else {}
    request = urllib.request.Request(airflow.stack.airflow_url + path, headers=headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()


def links_of(airflow, run, task, dag_id="train_ppo"):
    return airflow.api.call("GET", f"/dags/{dag_id}/dagRuns/{run}/taskInstances/{task}/links")["extra_links"]


def test_every_task_links_to_a_page_that_is_there(airflow, shown, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", airflow.stack.mlflow_url)
    runs = {}
    for task, state in airflow.finished(shown).items():
        if state != "success":
            continue
        found = links_of(airflow, shown, task)
        runs[task] = found["MLflow run"].rpartition("/runs/")[2]
        with mlflow_client() as client:
            assert client.get_run(runs[task]).info.experiment_id in found["MLflow run"]
        assert found["MLflow run"].startswith(f"{airflow.stack.mlflow_url}/#/experiments/")
        assert get(airflow, found["Report"])[0] == 200
        if "Job log" in found:
            assert get(airflow, found["Job log"])[0] == 200
    assert runs["stage_1.train"] == runs["stage_1.evaluate"] != runs["begin"] == runs["register"] == runs["prepare"]


def test_the_links_of_a_task_are_there_while_it_runs(airflow):
    airflow.plan({"early/prepare": [{"seconds": 60}]})
    run = airflow.api.trigger("train_ppo", {"preset": "tiny", "stages": 1}, "early")
    airflow.wait((airflow.job(run, "prepare") / "started").exists)
    assert all(links_of(airflow, run, "prepare").values())
    airflow.api.set_state("train_ppo", run, "prepare", "failed")
    airflow.finished(run)


def test_the_job_log_is_the_whole_log_as_text(airflow, shown):
    status, headers, text = get(airflow, links_of(airflow, shown, "prepare")["Job log"])
    assert (status, headers.get_content_type()) == (200, "text/plain") and "words of <the> engine" in text
    status, _, text = get(airflow, f"/ratchet/runs/train_ppo/{shown}/log/none")
    assert status == 404 and "RATCHET_HOME" in text
    status, _, text = get(airflow, f"/ratchet/runs/train_ppo/..%2F..%2F{shown}/log/prepare")
    assert status == 404


def test_the_note_says_what_came_out(airflow, shown):
    note = airflow.api.run("train_ppo", shown)["note"]
    made = airflow.api.xcom("train_ppo", shown, "register")
    assert note.startswith(f"**Ratchet:** candidate **tiny/{made['version']}** from stage 1: mean_reward 0 → 0.9")
    assert f"/ratchet/runs/train_ppo/{shown}/report" in note


@pytest.mark.parametrize(("conf", "said"), [
    ({"override": "train: {actor: {lr: fast}}"}, "train.actor.lr: Input should be a valid number"),
    ({"override": "train: ["}, "override: while parsing"),
])
def test_a_refused_form_says_why_in_the_note(airflow, conf, said):
    run = airflow.api.trigger("train_ppo", {"preset": "tiny", **conf})
    assert airflow.finished(run)["begin"] == "failed"
    note = airflow.api.run("train_ppo", run)["note"]
    assert note.startswith("**Ratchet:** `begin` failed: SpecError: ") and said in note


def test_a_persons_note_stays_before_ours(airflow):
    airflow.plan({"noted/prepare": [{"exit": 2, "seconds": 4}]})
    run = airflow.api.trigger("train_ppo", {"preset": "tiny", "stages": 1}, "noted")
    airflow.api.call("PATCH", f"/dags/train_ppo/dagRuns/{run}", {"note": "Second try with less data."})
    airflow.finished(run)
    note = airflow.api.run("train_ppo", run)["note"]
    assert note.startswith("Second try with less data.\n\n**Ratchet:** `prepare` failed: prepare attempt 1: exit code")


def test_the_tab_shows_result_links_and_verdict_of_the_run_and_of_its_review(airflow, shown):
    views = [view for plugin in airflow.api.call("GET", "/plugins")["plugins"] for view in plugin["external_views"]]
    tab = next(view for view in views if view["name"] == "Ratchet")
    assert tab["destination"] == "dag_run"
    review = airflow.review_of(shown)
    version = airflow.api.xcom("train_ppo", shown, "register")["version"]
    for dag_id, run in (("train_ppo", shown), ("review_candidate", review)):
        status, headers, text = get(airflow, tab["href"].replace("{DAG_ID}", dag_id).replace("{RUN_ID}", run))
        assert status == 200 and "script-src 'sha256-" in headers["Content-Security-Policy"]
        for words in ("tiny: grpo", "gate passed", "mean_reward rises", "0.9", f"tiny/{version}",
                      f"{airflow.stack.mlflow_url}/#/models/tiny/versions/{version}",
                      f"{airflow.stack.airflow_url}/ratchet/runs/train_ppo/{shown}/report"):
            assert words in text, words


def test_a_run_that_is_not_ours_or_not_there_shows_a_page_that_says_so(airflow, shown):
    for dag_id, run in (("train_ppo", "never"), ("nothing", "x")):
        assert "no training run of Ratchet" in get(airflow, f"/ratchet/runs/{dag_id}/{run}")[2]


def test_the_report_has_the_verdict_in_airflow_and_in_mlflow(airflow, shown, monkeypatch):
    status, headers, text = get(airflow, links_of(airflow, shown, "register")["Report"])
    assert status == 200 and "gate passed" in text and "sandbox" in headers["Content-Security-Policy"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", airflow.stack.mlflow_url)
    with mlflow_client() as client:
        version = registry.read("tiny", airflow.api.xcom("train_ppo", shown, "register")["version"])
        path = client.download_artifacts(version.run_id, "report/report.html")
    with open(path) as file:
        assert "gate passed" in file.read()


@pytest.mark.parametrize("page", ["", "/report", "/log/prepare"])
def test_nobody_sees_anything_without_a_login(airflow, shown, page):
    status, _, text = get(airflow, f"/ratchet/runs/train_ppo/{shown}{page}", login=False)
    assert status == 401 and "tiny" not in text
    for other in ("/", "/docs", "/openapi.json", "/redoc"):
        assert get(airflow, f"/ratchet{other}", login=False)[0] == 404
