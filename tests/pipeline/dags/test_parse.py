"""What parsing the DAG files loads, and the shape of what they make."""

import os
import runpy
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from tasks.launchers.deadman import FOLLOWED_LIMIT_S

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
        assert task.retries == 25 and task.retry_exponential_backoff
        # Between two tries nobody follows the engine; it must not be ended for that.
        assert 5 * task.max_retry_delay < timedelta(seconds=FOLLOWED_LIMIT_S)


def test_a_candidate_starts_its_review(dags):
    from airflow.sdk import PartitionedAssetTimetable

    from tasks.assets import CANDIDATE, CHAMPION

    review = dags["review_candidate"]
    assert list(dags["train_ppo"].get_task("register").outlets) == [CANDIDATE]
    assert list(review.get_task("promote").outlets) == [CHAMPION]
    assert isinstance(review.schedule, PartitionedAssetTimetable) and review.schedule.asset_condition == CANDIDATE
    assert review.catchup is False


def test_a_review_that_does_not_promote_rejects_or_starts_over_and_promotions_run_one_at_a_time(dags):
    from tasks.assets import CANDIDATE

    review = dags["review_candidate"]
    for task in ("reject", "review_again"):
        assert upstream(review, task) == {"promote"} and review.get_task(task).trigger_rule == "all_skipped"
    assert list(review.get_task("review_again").outlets) == [CANDIDATE]
    assert review.get_task("promote").max_active_tis_per_dag == 1
    assert list(review.get_task("reject").outlets) == []


def test_what_a_person_starts_needs_its_fields(dags):
    from airflow.sdk.exceptions import ParamValidationError

    for dag_id, fields in {"rollback": ("model", "reason"), "evaluate_model": ("model", "prompts")}.items():
        assert dags[dag_id].schedule is None
        for field in fields:
            with pytest.raises(ParamValidationError):
                dags[dag_id].params.get_param(field).resolve("")
    with pytest.raises(ParamValidationError):
        dags["rollback"].params.get_param("version").resolve("champion")


def test_prompts_that_land_start_a_retraining_and_neither_runs_twice_at_once_nor_catches_up(dags):
    from tasks.assets import PROMPTS

    assert list(dags["land_prompts"].get_task("look").outlets) == [PROMPTS]
    assert dags["land_prompts"].schedule is None and dags["retrain"].schedule is None, "nothing is configured here"
    for name in ("land_prompts", "retrain"):
        assert dags[name].max_active_runs == 1 and dags[name].catchup is False
    # The runs of a backfill are counted apart from the others.
    assert dags["retrain"].get_task("choose").max_active_tis_per_dag == 1
    assert upstream(dags["retrain"], "record") == {"train"} and upstream(dags["retrain"], "train") == {"choose"}


def test_the_form_offers_every_preset_and_refuses_others(dags):
    from airflow.sdk.exceptions import ParamValidationError

    params = dags["train_ppo"].params
    assert params.get_param("preset").schema["enum"] == sorted(p.stem for p in Path("examples").glob("*.yaml"))
    for name, wrong in (("preset", "none"), ("stages", 0), ("stages", 5), ("iterations", "x"), ("iterations", 0),
                        ("lr", 0), ("lr", 2), ("seed", -1), ("algorithm", "magic"), ("approval", "maybe")):
        with pytest.raises(ParamValidationError):
            params.get_param(name).resolve(wrong)


def test_every_field_of_the_form_explains_itself_and_every_field_is_read(dags):
    from tasks.stages import Form

    params = dags["train_ppo"].params
    read = {"preset", "override", "force", *Form.__dataclass_fields__}
    assert set(params) == read
    for name in params:
        schema, description = params.get_param(name).schema, params.get_param(name).description
        assert schema["title"] and schema["section"] and description.endswith((".", "`")), name
        kind = schema.get("type", "string")
        if "integer" in kind or "number" in kind:
            assert "maximum" in schema and ("minimum" in schema or "exclusiveMinimum" in schema), name


def test_every_algorithm_of_the_schema_can_be_chosen(dags):
    from typing import get_args

    from engine.spec import Algorithm

    kinds = [kind.model_fields["kind"].default for kind in get_args(get_args(Algorithm)[0])]
    assert dags["train_ppo"].params.get_param("algorithm").schema["enum"] == [None, *kinds]


def test_every_task_of_the_training_shows_its_links(dags):
    for task in dags["train_ppo"].tasks:
        names = {link.name for link in task.operator_extra_links}
        job = task.task_id.endswith(("prepare", "train", "evaluate", "report", "sft", "reward_model", "dpo"))
        assert names == {"MLflow run", "Report"} | ({"Job log"} if job else set()), task.task_id


def test_housekeeping_is_weekly_and_a_dry_run_unless_the_deployment_says_otherwise(dags, monkeypatch):
    dag = dags["housekeeping"]
    assert (dag.schedule, dag.catchup, dag.max_active_runs) == ("@weekly", False, 1)
    assert upstream(dag, "delete") == {"look"} and dag.params["dry_run"] is True
    monkeypatch.setenv("RATCHET_HOUSEKEEPING", "delete")
    assert runpy.run_path("dags/housekeeping.py")["dag"].params["dry_run"] is False
    monkeypatch.setenv("RATCHET_HOUSEKEEPING", "yes")
    with pytest.raises(ValueError, match="RATCHET_HOUSEKEEPING='yes' is neither"):
        runpy.run_path("dags/housekeeping.py")
