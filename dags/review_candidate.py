"""DAG `review_candidate`: compare the candidate with the champion >> gate >> approve >> promote, reject or again."""

from airflow.providers.standard.operators.python import PythonOperator
from airflow.sdk import DAG, Param, PartitionedAssetTimetable

from tasks import deployment, notes, review
from tasks.approval import PolicyApprovalOperator
from tasks.assets import CANDIDATE, CHAMPION
from tasks.operators import RETRIES, EngineOperator, GoOnOperator

DOC = """
### Decide whether a candidate replaces the champion

Starts by itself when `train_ppo` registers a candidate; by hand, give the registered model and a version. Both models
are evaluated on the same prompts with the same seeds, the gate of the run's preset judges, a person approves (or the
policy, when the preset says `automatic`), and the alias `champion` moves. A candidate that does not get through keeps
the reason as tags.

**To answer:** here, on the task `approve` (tab *Required Actions*), or in MLflow, by the tag `review` of the model
version: `approve`, or `reject: and why`. The first answer counts; without one the candidate is rejected when the
preset's time limit is over. A failed gate is not overruled by an approval.

**If the champion changes meanwhile** (another review, a rollback, a person in MLflow), the evidence is out of date:
nothing is promoted, and `review_again` starts a new review against the new champion.
"""

PARAMS = {
    "model": Param("", type=["null", "string"], title="Registered model"),
    "version": Param("candidate", type=["null", "string"], title="Version", description="A number or an alias."),
}

with DAG(
    "review_candidate", params=PARAMS, schedule=PartitionedAssetTimetable(assets=CANDIDATE), catchup=False,
    max_active_runs=32, doc_md=DOC, tags=["ratchet", "review"],
    default_args=RETRIES | {"on_failure_callback": notes.failed},
) as dag:
    load = PythonOperator(task_id="load", python_callable=review.load)
    evaluate = EngineOperator(
        task_id="evaluate", spec=review.compare_job, pool="gpus", pool_slots=deployment.pool_slots())
    gate = GoOnOperator(task_id="gate", decide=review.judge)
    approve = PolicyApprovalOperator(
        task_id="approve", question=review.question,
        subject="Promote {{ ti.xcom_pull(task_ids='load')['model'] }} version "
                "{{ ti.xcom_pull(task_ids='load')['candidate'] }} to champion?")
    # One at a time: MLflow has no compare-and-set, so two promotions must not look and move at the same moment.
    promote = PythonOperator(
        task_id="promote", python_callable=review.promote, outlets=[CHAMPION], max_active_tis_per_dag=1)
    # These run only when the gate, a person, the time limit or another champion kept the promotion from running.
    reject = PythonOperator(task_id="reject", python_callable=review.reject, trigger_rule="all_skipped")
    again = PythonOperator(
        task_id="review_again", python_callable=review.review_again, outlets=[CANDIDATE], trigger_rule="all_skipped")

    load >> evaluate >> gate >> approve >> promote >> [reject, again]
