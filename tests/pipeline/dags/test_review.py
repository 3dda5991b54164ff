"""Reviews, rollback and evaluations under the real scheduler, MLflow and registry; only the engine is a stand-in.

No test trains: candidates are registered as `train_ppo` registers them. All reviews start together, each of a
registered model of its own; two of them by events that arrive together.
"""

import json
from dataclasses import dataclass

import pytest

from engine.errors import FaultError
from engine.spec import TrackingSpec
from engine.store import hash_model_dir
from tasks import pipeline, registry, runs, tracking
from tasks.registry import CANDIDATE, CHAMPION, PREVIOUS, REFUSED_TAG
from tests.pipeline.examples import preset

pytestmark = pytest.mark.slow

REVIEW = "review_candidate"
SECONDS = 240.0


@dataclass
class Reviews:
    """What the tests share: the stack, a client of its MLflow, and where candidates are made."""

    airflow: object
    client: object

    def register(self, model, number, **gate):
        """A candidate as `train_ppo` leaves it: a directory with weights, the run's files, a version."""
        root = self.airflow.home / "store" / "runs" / "test" / f"{model}-{number}"
        export = root / "export"
        export.mkdir(parents=True)
        (export / "model.safetensors").write_bytes(f"{model} {number}".encode())
        (export / "config.json").write_text((self.airflow.home / "models" / "tiny" / "config.json").read_text())
        run = tracking.parent_run("reviews", f"{model}/{number}", name="a run", lineage=tracking.Lineage())
        plan = pipeline.parse_pipeline(preset(gate=gate, registry={"model": model}))
        runs.write_run(str(root), runs.RunFile(
            pipeline=plan, preset="tiny", base_model=str(self.airflow.home / "models" / "tiny"), dag_id="test",
            run_id=f"{model}-{number}", tracking=TrackingSpec(experiment="reviews", run_id=run.run_id)))
        weights = hash_model_dir(export)
        version = registry.register_candidate(model, registry.CandidateFiles(
            export_uri=str(export), weights_hash=weights, run_id=run.run_id, run_uri=str(root)))
        runs.write_candidate(str(root), runs.CandidateFile(
            model=model, version=version.version, stage=1, export_uri=str(export), weights_hash=weights,
            prompts=str(root / "prompts")))
        return version

    def champion(self, model, number):
        """A version that is champion already."""
        version = self.register(model, number)
        return registry.promote(version, base=registry.read(model, CHAMPION), files_hash=version.weights_hash,
                                decision=registry.Decision(by="ada", reason="the first one"))

    def review(self, version):
        """Start a review; the run id tells which."""
        return self.airflow.api.trigger(REVIEW, {"model": version.model, "version": version.version},
                                        f"{version.model}-{version.version}")

    def waits(self, run):
        """Wait until a person is asked."""
        self.airflow.asked(run, SECONDS)

    def answer(self, run, option):
        """Answer in Airflow."""
        self.airflow.api.answer(REVIEW, run, "approve", option)

    def tag(self, version, key, value):
        """What a person does in MLflow's UI."""
        self.client.set_model_version_tag(version.model, version.version, key, value)

    def ended(self, run):
        """States of a review's tasks at its end."""
        return self.airflow.finished(run, REVIEW, SECONDS)

    def announce(self, *versions):
        """The asset events of several candidates, one right after the other."""
        assets = self.airflow.api.call("GET", "/assets?name_pattern=candidate")["assets"]
        asset_id = next(asset["id"] for asset in assets if asset["name"] == "candidate")
        for version in versions:
            extra = {"model": version.model, "version": version.version, "run_uri": version.tags["ratchet.run"]}
            body = {"asset_id": asset_id, "extra": extra, "partition_key": f"{version.model}/{version.version}"}
            self.airflow.wait(lambda body=body: self.posted("/assets/events", body))

    def posted(self, path, body):
        """Whether Airflow took it: on SQLite it answers 500 when somebody else writes at that moment."""
        try:
            return self.airflow.api.call("POST", path, body)
        except FaultError as error:
            assert "Database error" in str(error), error
            return None

    def automatic_review(self, version):
        """Wait for the review that an asset event started; its run id."""
        def find():
            for run in self.airflow.api.runs(REVIEW):
                loaded = self.airflow.api.xcom(REVIEW, run["dag_run_id"], "load") or {}
                if run["run_type"] == "asset_triggered" and (
                        loaded.get("model"), loaded.get("candidate")) == (version.model, version.version):
                    return run["dag_run_id"]
            return None

        return self.airflow.wait(find, SECONDS)


def now(version):
    """A version as it is now."""
    return registry.read(version.model, version.version)


@pytest.fixture(scope="module")
def reviews(airflow):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", airflow.stack.mlflow_url)
        scores = {"-better-1": 0.9, "worse-1": 0.03}
        for model in ("two", "behind"):
            scores |= {f"{model}-1": 0.5, f"{model}-2": 0.9, f"{model}-3": 0.8}
        airflow.plan({"scores": {f"{name}/export": score for name, score in scores.items()}})
        with tracking.mlflow_client() as client:
            yield Reviews(airflow, client)


@pytest.fixture(scope="module")
def started(reviews):
    """All candidates, and their reviews, which wait for one another only where a test says so."""
    made = {name: reviews.register(f"{name}-better", 1, **gate) for name, gate in {
        "late": {"approval_timeout_hours": 0.001}, "tagged": {}, "early": {}, "moved": {}}.items()}
    made["worse"] = reviews.register("worse", 1, approval="automatic")
    for model in ("two", "behind"):
        made[f"{model}-champion"] = reviews.champion(model, 1)
        made[f"{model}-2"], made[f"{model}-3"] = reviews.register(model, 2), reviews.register(model, 3)
    reviews.tag(made["early"], "reviewer", "grace")
    reviews.tag(made["early"], "review", "reject: it rambles")
    reviews.tag(made["worse"], "review", "approve")
    for name in ("tagged", "two-2", "two-3", "behind-2", "moved", "late"):
        reviews.review(made[name])
    reviews.announce(made["early"], made["worse"])
    return made


def test_an_approval_in_mlflow_ends_the_wait_in_airflow(reviews, started):
    version = started["tagged"]
    reviews.waits("tagged-better-1")
    page = reviews.client.get_model_version(version.model, version.version).description
    assert "**Gate passed**" in page and "this set can detect" in page
    asked = reviews.airflow.api.call(
        "GET", f"/dags/{REVIEW}/dagRuns/tagged-better-1/taskInstances/approve/-1/hitlDetails")
    assert "### Answers that got better" in asked["body"] and "````text\n0.9 ```\n<img src=x>" in asked["body"]
    assert f"/#/models/{version.model}/versions/1" in asked["body"] and "/artifacts/report/report.html" in asked["body"]
    assert len(asked["body"]) < 25_000 and asked["options"] == ["Approve", "Reject"]
    reviews.tag(version, "review", "maybe")
    reviews.airflow.wait(lambda: "neither `approve` nor `reject`" in now(version).tags.get(REFUSED_TAG, ""))
    reviews.tag(version, "reviewer", "ada")
    reviews.tag(version, "review", "approve: shorter answers")
    assert reviews.ended("tagged-better-1")["promote"] == "success"
    assert now(version).status == "champion" and now(version).tags["ratchet.decided_by"] == "ada"
    assert "approved by ada (shorter answers); gate: mean_reward rises" in now(version).tags["ratchet.reason"]
    assert now(version).tags[REFUSED_TAG] == "" and now(version).tags["ratchet.gate"] == "passed"


def test_of_two_reviews_against_one_champion_one_promotes_and_the_other_starts_over(reviews, started):
    winner, loser = started["two-2"], started["two-3"]
    reviews.waits("two-2")
    reviews.waits("two-3")
    reviews.answer("two-2", "Approve")
    assert reviews.ended("two-2")["promote"] == "success"
    states = reviews.ended("two-3")
    assert (states["promote"], states["reject"], states["review_again"]) == ("skipped", "skipped", "success")
    said = reviews.airflow.api.xcom(REVIEW, "two-3", "review_again")["reason"]
    assert said == "two/3 was compared with champion 1, but the champion is 2 now; review it again"
    again = reviews.automatic_review(loser)
    assert reviews.airflow.api.xcom(REVIEW, again, "load")["champion"] == "2"
    assert reviews.ended(again)["reject"] == "success"
    assert now(winner).status == "champion" and now(loser).status == "rejected"
    assert registry.read("two", PREVIOUS).version == "1"


def test_a_rollback_restores_the_champion_before_and_says_who_and_why(reviews, started):
    airflow, left = reviews.airflow, started["two-2"]
    with pytest.raises(FaultError, match="reason"):
        airflow.api.trigger("rollback", {"model": "two"})
    wrong = airflow.api.trigger("rollback", {"model": "two", "version": "3", "reason": "x"})
    right = airflow.api.trigger("rollback", {"model": "two", "reason": "answers in German"})
    assert airflow.finished(wrong, "rollback")["roll_back"] == "failed"
    assert "two/3 was never champion (it is rejected)" in airflow.api.log("rollback", wrong, "roll_back")
    assert airflow.finished(right, "rollback")["roll_back"] == "success"
    restored = registry.read("two", CHAMPION)
    assert (restored.version, restored.status) == ("1", "champion")
    assert now(left).status == "rolled_back" and now(left).tags["ratchet.decided_by"] == "admin"
    assert now(left).tags["ratchet.reason"] == "answers in German"
    events = airflow.api.call("GET", "/assets/events?order_by=-timestamp&limit=1")["asset_events"]
    assert events[0]["source_dag_id"] == "rollback" and events[0]["extra"]["export_uri"] == restored.export_uri

    airflow.api.clear("rollback", right, ["roll_back"])
    airflow.wait(lambda: airflow.api.tasks("rollback", right)["roll_back"]["try_number"] == 2)
    assert airflow.finished(right, "rollback")["roll_back"] == "success"
    assert registry.read("two", CHAMPION).version == "1"


def test_a_champion_moved_behind_our_back_is_not_overwritten_but_compared_with(reviews, started):
    candidate, other = started["behind-2"], started["behind-3"]
    reviews.waits("behind-2")
    reviews.client.set_registered_model_alias("behind", CHAMPION, other.version)
    try:
        reviews.answer("behind-2", "Approve")
    except FaultError as error:
        assert "409" in str(error), error  # the review saw the move in these milliseconds already
    states = reviews.ended("behind-2")
    assert (states["promote"], states["reject"], states["review_again"]) == ("skipped", "skipped", "success")
    assert registry.read("behind", CHAMPION).version == other.version and now(candidate).status == CANDIDATE
    again = reviews.automatic_review(candidate)
    assert reviews.airflow.api.xcom(REVIEW, again, "load")["champion"] == other.version
    reviews.waits(again)
    reviews.answer(again, "Reject")
    reviews.ended(again)
    assert now(candidate).status == "rejected"


def test_the_alias_moved_to_the_candidate_by_hand_is_its_approval(reviews, started):
    version = started["moved"]
    reviews.waits("moved-better-1")
    reviews.client.set_registered_model_alias(version.model, CHAMPION, version.version)
    assert reviews.ended("moved-better-1")["promote"] == "success"
    assert now(version).status == "champion" and now(version).aliases == (CHAMPION,)
    assert "the alias champion was moved by hand" in now(version).tags["ratchet.reason"]


def test_a_rejection_in_mlflow_before_the_question_is_the_answer(reviews, started):
    version = started["early"]
    review = reviews.automatic_review(version)
    states = reviews.ended(review)
    assert (states["approve"], states["promote"], states["reject"]) == ("success", "skipped", "success")
    assert now(version).status == "rejected" and now(version).tags["ratchet.decided_by"] == "grace"
    assert now(version).tags["ratchet.reason"].startswith("rejected by grace (it rambles); gate: ")
    with pytest.raises(FaultError, match="404"):
        reviews.answer(review, "Approve")  # nobody was asked


def test_an_approval_in_mlflow_does_not_overrule_a_failed_gate_and_says_so(reviews, started):
    states = reviews.ended(reviews.automatic_review(started["worse"]))
    assert (states["gate"], states["approve"], states["promote"], states["reject"]) == (
        "success", "skipped", "skipped", "success")
    version = now(started["worse"])
    assert version.status == "rejected" and version.tags["ratchet.gate"] == "failed"
    assert version.tags[REFUSED_TAG].startswith("rejected by gate: mean_reward rises: +0.03333 (lower bound")
    assert registry.read("worse", CHAMPION) is None


def test_of_two_candidates_announced_at_once_each_is_reviewed_in_a_run_of_its_own(reviews, started):
    for version in (started["early"], started["worse"]):
        run = reviews.airflow.api.run(REVIEW, reviews.automatic_review(version))
        assert run["partition_key"] == f"{version.model}/{version.version}"


def test_without_an_answer_in_time_the_candidate_is_rejected(reviews, started):
    version = started["late"]
    assert reviews.ended("late-better-1")["reject"] == "success"
    assert now(version).status == "rejected" and now(version).tags["ratchet.decided_by"] == "time limit"
    assert "nobody answered in time" in now(version).tags["ratchet.reason"]
    assert registry.read(version.model, CHAMPION) is None


def test_a_version_that_was_decided_on_is_not_reviewed_again(reviews, started):
    reviews.ended("late-better-1")
    run = reviews.airflow.api.trigger(REVIEW, {"model": "late-better", "version": "1"})
    assert reviews.ended(run)["load"] == "failed"
    assert "is rejected already, decided by time limit" in reviews.airflow.api.log(REVIEW, run, "load")


@pytest.fixture(scope="module")
def prompts(reviews):
    directory = reviews.airflow.home / "prompts"
    directory.mkdir()
    (directory / "manifest.json").write_text(json.dumps({"sets": {"eval": {"sha256": "p" * 64, "files": []}}}))
    return str(directory)


def test_any_model_is_evaluated_on_any_prompts_and_the_result_is_in_mlflow(reviews, prompts):
    airflow, version = reviews.airflow, reviews.champion("any-better", 1)
    asked = [{"model": "any-better", "prompts": prompts},
             {"model": version.export_uri, "version": "", "prompts": prompts}]
    for evaluation in [airflow.api.trigger("evaluate_model", conf) for conf in asked]:
        assert set(airflow.finished(evaluation, "evaluate_model", SECONDS).values()) == {"success"}
        found = airflow.api.xcom("evaluate_model", evaluation, "result")
        assert found["uri"] == version.export_uri and found["metrics"] == {"eval/mean_reward": 0.9}
        run = reviews.client.get_run(found["mlflow"].rpartition("/")[2])
        assert run.info.status == "FINISHED" and run.data.tags["ratchet.data_hash"] == "p" * 64
        spec = json.loads((airflow.job(evaluation, "evaluate", "evaluate_model") / "spec.json").read_text())
        assert spec["tracking"]["run_id"] == run.info.run_id and spec["cache"].endswith("/evaluations")
        assert spec["prompts"] == prompts and spec["max_response_tokens"] == 8


@pytest.mark.parametrize(("conf", "said"), [
    ({"version": "7"}, "version: the registry has no two/7"),
    ({"model": "/no/such/model"}, "model: /no/such/model is not a directory"),
    ({"prompts": "/no/such/prompts"}, "prompts: /no/such/prompts/manifest.json is not there"),
])
def test_an_evaluation_of_what_is_not_there_fails_before_anything_starts(reviews, started, prompts, conf, said):
    run = reviews.airflow.api.trigger("evaluate_model", {"model": "two", "prompts": prompts, **conf})
    states = reviews.airflow.finished(run, "evaluate_model", SECONDS)
    assert states == {"begin": "failed", "evaluate": "upstream_failed", "result": "upstream_failed"}
    assert reviews.airflow.api.tasks("evaluate_model", run)["begin"]["try_number"] == 1
    assert said in reviews.airflow.api.log("evaluate_model", run, "begin")


def test_an_evaluation_with_a_wrong_form_is_refused(reviews, prompts):
    for conf in ({"model": "two"}, {"prompts": prompts}, {"model": "two", "prompts": prompts, "preset": "none"}):
        with pytest.raises(FaultError, match="400"):
            reviews.airflow.api.trigger("evaluate_model", conf)
