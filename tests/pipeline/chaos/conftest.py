"""A stack with an object store, the real engine, and canaries for credentials; the same training undisturbed."""

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tasks.stack import answers, free_port
from tests.pipeline.airflow_stack import Airflow
from tests.pipeline.chaos.undisturbed import Undisturbed
from tests.pipeline.fake_engine import REAL_ENGINE

CANARIES = {
    "AWS_ACCESS_KEY_ID": "CANARYKEYID0001", "AWS_SECRET_ACCESS_KEY": "CANARYSECRET0002",
    "AWS_SESSION_TOKEN": "CANARYTOKEN0003", "HF_TOKEN": "CANARYHUB0004", "RATCHET_JUDGE_KEY": "CANARYJUDGE0005"}
"""Secrets of the environment in which the stack starts."""


def preset() -> dict:
    """The tiny preset, shortened: two stages of four iterations, a checkpoint after each."""
    tiny = copy.deepcopy(yaml.safe_load(Path("examples/tiny.yaml").read_text()))
    tiny["train"] |= {"iterations": 4, "prompts_per_iteration": 16, "checkpoint_every": 1}
    tiny["prepare"]["eval"]["sources"][0]["size"] = 16
    tiny["prepare"]["train"]["sources"][0]["size"] = 100
    return tiny | {"model": "models/real", "registry": {"model": "chaos"}}


@pytest.fixture(scope="package")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    """Started; its DAG `review_candidate` waits."""
    if not Path(REAL_ENGINE).exists():
        pytest.skip("no engine environment; `make setup`")
    home = tmp_path_factory.mktemp("chaos")
    port = free_port(21000 + 10 * (os.getpid() % 200))
    made = Airflow(home, Path(REAL_ENGINE), environment={
        **CANARIES, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_DEFAULT_REGION": "us-east-1",
        "RATCHET_STORE": "s3://bucket/ratchet"})
    made.write_preset("real", preset())
    with made as started:
        # A component like the others: watched, started again, stopped at the end.
        started.stack._launch("object-store", [
            sys.executable, str(Path(__file__).with_name("object_store.py")), str(port), str(home / "objects")])
        started.wait(lambda: answers(f"http://127.0.0.1:{port}/moto-api/"))
        subprocess.run([REAL_ENGINE, "examples/models.py", "tiny", str(home / "models" / "real")], check=True)
        started.api.call("PATCH", "/dags/review_candidate", {"is_paused": True})
        yield started


@pytest.fixture(scope="package")
def undisturbed(stack: Airflow, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """What every run has to end with."""
    return Undisturbed(preset(), stack.home / "models" / "real", tmp_path_factory.mktemp("undisturbed"))
