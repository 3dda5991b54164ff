"""DAG `land_prompts`: look at the watched prefix >> report what landed and what was refused."""

from airflow.providers.standard.operators.python import PythonOperator
from airflow.sdk import DAG, Param

from tasks import deployment, landing
from tasks.assets import PROMPTS
from tasks.operators import RETRIES

DOC = """
### Take in files of prompts

Every run is one look at a prefix of the store (`RATCHET_PROMPTS`). A file `*.jsonl` or `*.jsonl.gz` that two looks saw
unchanged, and that has a done marker (`NAME.done` beside it, `_SUCCESS` in its folder) or was unchanged for
`settle_s`, is checked, copied below `RATCHET_STORE/prompts/landed`, and announced as the asset `prompts`, which starts
`retrain`. The same content lands once, whatever its name.

A run that is **failed** at `report` refused a file: the task's log says which and why. The others landed. Mend the file
or remove it; a changed file is looked at again. A **skipped** look found nothing new.
"""

PARAMS = {
    "prefix": Param(
        None, type=["null", "string"], title="Prefix",
        description="A path or s3:// to look at instead of this deployment's."),
    "settle_s": Param(
        300, type="integer", minimum=0, title="Seconds unchanged",
        description="How long a file without a done marker must have been the same."),
}

with DAG(
    "land_prompts", params=PARAMS, schedule=deployment.landing_cron(), catchup=False, max_active_runs=1, doc_md=DOC,
    tags=["ratchet", "data"],
    default_args=RETRIES,
) as dag:
    look = PythonOperator(task_id="look", python_callable=landing.look, outlets=[PROMPTS])
    # Also after a look that announced nothing: it may have refused something.
    report = PythonOperator(task_id="report", python_callable=landing.report, trigger_rule="none_failed")

    look >> report
