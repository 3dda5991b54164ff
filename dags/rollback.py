"""DAG `rollback`: point the alias `champion` at the model before it, or at a named version."""

from airflow.providers.standard.operators.python import PythonOperator
from airflow.sdk import DAG, Param

from tasks import notes, rollback
from tasks.assets import CHAMPION
from tasks.operators import RETRIES

DOC = """
### Go back to the model in production before this one

The alias `champion` moves to `previous_champion`, or to the version given, if that was champion before and its files
are still those that were registered. The version left is marked `rolled_back` with the reason and the name of whoever
started this run, and is never promoted again by a review; waiting reviews start over against the restored model.
The asset `champion` tells whoever serves the model. A retry of the task does nothing twice.
"""

PARAMS = {
    "model": Param(type="string", minLength=1, title="Registered model"),
    "version": Param("", type=["null", "string"], pattern="^[0-9]*$", title="Version",
                     description="Number of the version to go back to; empty: `previous_champion`."),
    "reason": Param(type="string", minLength=1, title="Reason", description="Kept on the version that is left."),
}

with DAG(
    "rollback", params=PARAMS, schedule=None, catchup=False, max_active_runs=1, doc_md=DOC, tags=["ratchet", "review"],
    default_args=RETRIES | {"on_failure_callback": notes.failed},
) as dag:
    PythonOperator(task_id="roll_back", python_callable=rollback.roll_back, outlets=[CHAMPION])
