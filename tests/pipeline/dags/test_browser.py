"""What a person does, in a real browser: start a run from the form, approve its candidate, find both in MLflow.

With RATCHET_SCREENSHOTS=DIR the pages are saved there.
"""

import os
import re
import shutil
from pathlib import Path

import pytest

from tasks import registry

pytestmark = pytest.mark.slow

RUN = "from-the-browser"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""


@pytest.fixture(scope="module")
def page(airflow):
    """A page of a person who is logged in to Airflow."""
    if not CHROMIUM:
        pytest.skip("no chromium on PATH; Debian: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Chromium refuses to sandbox itself for root; it only opens our own pages on 127.0.0.1.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1500, "height": 1000})
        page.set_default_timeout(90_000)
        page.goto(f"{airflow.stack.airflow_url}/auth/login")
        page.fill("input[name=username]", "admin")
        page.fill("input[name=password]", airflow.stack.password)
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_url(lambda url: "login" not in url)
        yield page
        browser.close()


def shoot(page, name):
    """Keep a picture of the page when asked to."""
    if folder := os.environ.get("RATCHET_SCREENSHOTS"):
        page.wait_for_timeout(1500)
        page.screenshot(path=Path(folder) / f"{name}.png")


def choose(page, field, option):
    """Take an option of a list of the form."""
    page.locator(f"input[name=element_{field}]").locator("xpath=..").get_by_role("combobox").click()
    page.get_by_role("option", name=option, exact=True).click()


@pytest.fixture(scope="module")
def started(airflow, page):
    """A run that was started from the form."""
    airflow.plan({"scores": {f"{RUN}/stage_1": 0.99}})
    page.goto(f"{airflow.stack.airflow_url}/dags/train_ppo")
    page.get_by_role("button", name="Trigger Dag").click()
    form = page.get_by_role("dialog")
    form.get_by_role("button", name="What", exact=True).click()
    choose(page, "preset", "tiny")
    shoot(page, "airflow-form")
    form.get_by_role("button", name="How long", exact=True).click()
    form.locator("input[name=element_stages]").fill("1")
    form.get_by_role("button", name="Review", exact=True).click()
    choose(page, "approval", "human")
    form.get_by_role("button", name="Advanced Options", exact=True).click()
    form.locator("input[name=dagRunId]").fill(RUN)
    form.get_by_role("button", name="Trigger", exact=True).click()
    page.wait_for_url(re.compile(f"/dags/train_ppo/runs/{RUN}"))


@pytest.fixture(scope="module")
def candidate(airflow, started):
    """The version that the run registered."""
    assert airflow.finished(RUN)["register"] == "success"
    return airflow.api.xcom("train_ppo", RUN, "register")["version"]


@pytest.fixture(scope="module")
def approved(airflow, page, candidate):
    """The candidate's review, approved by a click; its tasks' states."""
    review = airflow.review_of(RUN)
    airflow.asked(review)
    page.goto(f"{airflow.stack.airflow_url}/required_actions")
    page.get_by_role("link", name=f"Promote tiny version {candidate} to champion?").click()
    page.get_by_text("mean_reward rises").first.wait_for()
    shoot(page, "airflow-approval")
    page.get_by_role("button", name="Approve", exact=True).click()
    return airflow.finished(review, "review_candidate")


def test_a_run_is_started_from_the_form(airflow, started):
    conf = airflow.api.run("train_ppo", RUN)["conf"]
    assert (conf["preset"], conf["stages"], conf["approval"], conf["lr"]) == ("tiny", 1, "human", None)


def test_the_grid_shows_the_run_to_its_end(airflow, page, started):
    page.goto(f"{airflow.stack.airflow_url}/dags/train_ppo/runs/{RUN}")
    page.get_by_text("Success", exact=True).first.wait_for()
    shoot(page, "airflow-grid")
    assert airflow.finished(RUN)["register"] == "success"


def test_the_approval_shows_the_evidence_and_approving_promotes(airflow, candidate, approved, monkeypatch):
    assert approved["promote"] == "success"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", airflow.stack.mlflow_url)
    champion = registry.read("tiny", registry.CHAMPION)
    assert champion.version == candidate and champion.tags["ratchet.decided_by"] == "admin"


def test_the_tab_of_a_run_shows_the_verdict_and_its_links_open_beside_it(airflow, page, approved):
    page.goto(f"{airflow.stack.airflow_url}/dags/train_ppo/runs/{RUN}/plugin/ratchet")
    card = page.frame_locator("iframe[title=Ratchet]")
    card.get_by_text("gate passed").first.wait_for()
    shoot(page, "airflow-card")
    with page.context.expect_page() as opened:
        card.get_by_role("link", name="Report").click()
    opened.value.get_by_text("gate passed").first.wait_for()
    assert opened.value.url == f"{airflow.stack.airflow_url}/ratchet/runs/train_ppo/{RUN}/report"
    opened.value.close()


def test_the_champion_is_in_the_registry_with_its_evidence(airflow, page, candidate, approved):
    page.goto(f"{airflow.stack.mlflow_url}/#/models/tiny")
    page.get_by_role("link", name=f"Version {candidate}", exact=True).click()
    page.get_by_text("Gate passed").wait_for()
    page.get_by_text("champion", exact=True).first.wait_for()
    shoot(page, "mlflow-champion")


def test_the_report_of_a_run_opens_in_mlflow(airflow, page, real_run):
    made = airflow.api.xcom("train_ppo", "end-to-end", "register")
    page.goto(f"{airflow.stack.mlflow_url}/#/models/real/versions/{made['version']}")
    page.get_by_role("link", name="real end-to-end").click()
    page.get_by_role("tab", name="Artifacts").click()
    page.get_by_text("report", exact=True).first.click()
    page.get_by_text("report.html").first.click()
    page.frame_locator("iframe").get_by_role("heading", name=re.compile("real: ppo")).wait_for()
    shoot(page, "mlflow-report")
