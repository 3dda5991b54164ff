"""Values of a spec are data, and what is secret in the environment stays there."""

import pytest

from engine.errors import SpecError
from tasks import jobs, stages
from tasks.launchers import local
from tests.pipeline.examples import preset
from tests.pipeline.tasks.test_jobs import ended, prepare_to

CANARIES = {"AWS_SECRET_ACCESS_KEY": "CANARY1", "AWS_SESSION_TOKEN": "CANARY2", "MLFLOW_TRACKING_PASSWORD": "CANARY3",
            "RATCHET_JUDGE_KEY": "CANARY4", "HF_TOKEN": "CANARY5", "MLFLOW_TRACKING_URI": "http://u:CANARY6@127.0.0.1:1"}


def test_values_of_a_spec_never_reach_a_shell(deployment):
    sign = deployment.home / "sign"
    evil = f"x;touch {sign};$(touch {sign})`touch {sign}`|touch {sign}&&touch {sign}\ntouch {sign}"
    directory = jobs.job_directory(deployment.home, "dag", evil, "task")
    jobs.submit(directory, prepare_to(deployment.home / evil, tokenizer=evil), local)
    assert ended(directory).phase == "done"
    assert not sign.exists()


def test_no_file_of_a_job_holds_a_secret_of_the_environment(deployment, monkeypatch):
    for name, value in CANARIES.items():
        monkeypatch.setenv(name, value)
    directory = deployment.home / "jobs" / "d" / "r" / "t"
    deployment.plan({"t": [{"exit": 3}, {}]})
    for _ in range(2):
        jobs.submit(directory, prepare_to(deployment.home / "prompts"), local)
        ended(directory)
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert {"spec.json", "job.json", "exit.json", "log.txt"} <= {path.name for path in files}
    assert not [path for path in files if b"CANARY" in path.read_bytes()]


@pytest.mark.parametrize(("url", "said"), [
    ("https://user:CANARY@judge:8000/v1", "RATCHET_JUDGE_KEY"), ("https://CANARY@judge/v1", "RATCHET_JUDGE_KEY"),
    ("wss://user:CANARY@judge", "should match pattern"),
])
def test_a_judge_with_a_password_in_its_address_is_refused_without_showing_it(url, said):
    rewards = [{"kind": "judge", "model": "m", "url": url}]
    with pytest.raises(SpecError, match=said) as refused:
        stages.resolve(preset(), stages.Form(), {"train": {"rewards": rewards}})
    assert "rewards.0.judge.url" in str(refused.value) and "CANARY" not in str(refused.value)
