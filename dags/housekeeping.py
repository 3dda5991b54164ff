"""DAG `housekeeping`: find what of old runs may go >> delete it, unless it is a dry run."""

from airflow.providers.standard.operators.python import PythonOperator
from airflow.sdk import DAG, Param

from tasks import deployment, housekeeping
from tasks.operators import RETRIES
from tasks.retention import KINDS, Policy

DOC = """
### Delete what old runs left, and say what every run cost

A **dry run** unless you say otherwise: task `look` lists what would be deleted, each with its size and the reason, and
the GPU-hours and the storage of every run (XCom `table`; the whole report lies in the store under `housekeeping/`).
With *dry run* off, task `delete` carries out that list.

Never touched: whatever a version with an alias (`champion`, `previous_champion`, `candidate`, any other) or one that
nobody has decided on refers to, DAG runs that have not ended, running jobs, and the models and prompts that these name.
All of it is asked again before each deletion. What a run was (its pipeline, lineage, review and report) stays for good.
"""

PARAMS = {
    "dry_run": Param(
        not deployment.housekeeping_deletes(), type="boolean", title="Dry run", section="How",
        description="List what would be deleted, and delete nothing."),
    "keep_runs": Param(
        Policy.keep_runs, type="integer", minimum=1, title="Newest runs", section="Keep",
        description="Of every DAG so many runs keep everything."),
    "keep_days": Param(
        Policy.keep_days, type="number", minimum=1, title="Days", section="Keep",
        description="A run in which something was written, or whose version was decided on, within so many days keeps "
                    "everything."),
    "what": Param(
        sorted(Policy.what), type="array", items={"type": "string", "enum": list(KINDS)}, examples=list(KINDS),
        title="What", section="Delete",
        description="jobs: job directories (logs, metrics, local copies). checkpoints. exports: models of versions "
                    "that were rejected, replaced or rolled back, and of stages that were never registered. prompts: "
                    "prepared rows. evaluations: cached answers."),
}

with DAG(
    "housekeeping", params=PARAMS, schedule="@weekly", catchup=False, max_active_runs=1, doc_md=DOC,
    tags=["ratchet", "operations"],
    default_args=RETRIES,
) as dag:
    look = PythonOperator(task_id="look", python_callable=housekeeping.look)
    delete = PythonOperator(task_id="delete", python_callable=housekeeping.carry_out)
    look >> delete
