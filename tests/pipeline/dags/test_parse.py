"""What parsing the DAG files loads, and the shape of what they make."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

FILES = sorted(Path("dags").glob("*.py"))


def test_parsing_dags_loads_no_engine_library(tmp_path):
    code = ("import runpy, sys, pathlib\n"
            "for f in pathlib.Path('dags').glob('*.py'): runpy.run_path(str(f))\n"
            "heavy = {'torch', 'vllm', 'megatron', 'transformers', 'mlflow', 'boto3', 'pandas', 'ray', 'requests'}\n"
            "print(sorted(heavy & set(sys.modules)))")
    environment = {**os.environ, "AIRFLOW_HOME": str(tmp_path), "PYTHONPATH": "."}
    said = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment).strip().splitlines()[-1]
    assert said == "[]"


def test_parsing_reads_no_preset_and_connects_to_nothing(tmp_path):
    code = ("import builtins, runpy, socket\n"
            "import airflow.sdk, airflow.providers.standard.operators.hitl\n"
            "def refuse(*a, **k): raise AssertionError('a connection at parse time')\n"
            "socket.socket.connect = refuse\n"
            "plain = builtins.open\n"
            "def watched(file, *a, **k):\n"
            "    assert not str(file).endswith('.yaml'), f'{file} read at parse time'\n"
            "    return plain(file, *a, **k)\n"
            "builtins.open = watched\n"
            "import pathlib\n"
            "for path in pathlib.Path('dags').glob('*.py'): runpy.run_path(str(path))\n"
            "print('parsed')")
    environment = {**os.environ, "AIRFLOW_HOME": str(tmp_path), "PYTHONPATH": "."}
    assert "parsed" in subprocess.check_output([sys.executable, "-c", code], text=True, env=environment)


@pytest.fixture(scope="module")
def dags(tmp_path_factory):
    os.environ.setdefault("AIRFLOW_HOME", str(tmp_path_factory.mktemp("airflow")))
    from airflow.sdk import DAG

    found = [value for file in FILES for value in runpy.run_path(str(file)).values() if isinstance(value, DAG)]
    return {dag.dag_id: dag for dag in found}


def upstream(dag, task_id):
    return set(dag.get_task(task_id).upstream_task_ids)


def test_stages_follow_each_other_and_the_candidate_waits_for_all(dags):
    dag = dags["train_ppo"]
    assert upstream(dag, "prepare") == {"begin"}
    assert upstream(dag, "sft") == {"prepare"}
    assert upstream(dag, "reward_model") == upstream(dag, "dpo") == {"sft"}
    assert upstream(dag, "stage_1.train") == {"reward_model", "dpo"}
    for task in ("sft", "reward_model", "dpo", "stage_1.train"):
        assert dag.get_task(task).trigger_rule == "none_failed", "a section that the preset lacks is skipped"
    for k in range(1, 5):
        assert upstream(dag, f"stage_{k}.evaluate") == {f"stage_{k}.train"}
    for k in range(2, 5):
        assert upstream(dag, f"stage_{k}.train") == {f"stage_{k - 1}.go_on"}
    assert upstream(dag, "register") == {f"stage_{k}.evaluate" for k in range(1, 5)}
    assert dag.get_task("register").trigger_rule == "none_failed_min_one_success"


def test_stopping_after_a_stage_skips_every_later_one_but_not_the_candidate(dags):
    dag = dags["train_ppo"]
    skipped = {task.task_id for task in dag.get_task("stage_2.go_on").dependants()}
    assert skipped == {"stage_3.train", "stage_3.evaluate", "stage_3.go_on", "stage_4.train", "stage_4.evaluate"}
    assert {t.task_id for t in dags["review_candidate"].get_task("gate").dependants()} == {"approve", "promote"}


def test_training_never_runs_twice_at_once_nor_catches_up(dags):
    dag = dags["train_ppo"]
    assert dag.max_active_runs == 1 and dag.catchup is False and dag.schedule is None
    for task in dag.tasks:
        on_gpus = task.task_id.endswith(("train", "evaluate", "sft", "reward_model", "dpo"))
        assert task.pool == ("gpus" if on_gpus else "default_pool")
        assert task.retries >= 5 and task.retry_exponential_backoff


def test_a_candidate_starts_its_review(dags):
    from tasks.assets import CANDIDATE, CHAMPION

    review = dags["review_candidate"]
    assert list(dags["train_ppo"].get_task("register").outlets) == [CANDIDATE]
    assert list(review.get_task("promote").outlets) == [CHAMPION]
    assert CANDIDATE in list(review.schedule) and review.catchup is False


def test_the_form_offers_every_preset_and_refuses_others(dags):
    from airflow.sdk.exceptions import ParamValidationError

    params = dags["train_ppo"].params
    assert params.get_param("preset").schema["enum"] == sorted(p.stem for p in Path("examples").glob("*.yaml"))
    for name, wrong in (("preset", "none"), ("stages", 0), ("stages", 5), ("iterations", "x"), ("approval", "maybe")):
        with pytest.raises(ParamValidationError):
            params.get_param(name).resolve(wrong)


def test_prompts_that_land_start_a_retraining_and_neither_runs_twice_at_once_nor_catches_up(dags):
    from tasks.assets import PROMPTS

    assert list(dags["land_prompts"].get_task("look").outlets) == [PROMPTS]
    assert dags["land_prompts"].schedule is None and dags["retrain"].schedule is None, "nothing is configured here"
    for name in ("land_prompts", "retrain"):
        assert dags[name].max_active_runs == 1 and dags[name].catchup is False
    # The runs of a backfill are counted apart from the others.
    assert dags["retrain"].get_task("choose").max_active_tis_per_dag == 1
    assert upstream(dags["retrain"], "record") == {"train"} and upstream(dags["retrain"], "train") == {"choose"}
