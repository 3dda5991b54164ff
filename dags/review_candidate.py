"""DAG `review_candidate`: compare the candidate with the champion >> gate >> approve >> promote, or reject."""

from datetime import timedelta

from airflow.providers.standard.operators.python import PythonOperator
from airflow.sdk import DAG, Param

from tasks import deployment, review
from tasks.assets import CANDIDATE, CHAMPION
from tasks.operators import EngineOperator, GoOnOperator, PolicyApprovalOperator

DOC = """
### Decide whether a candidate replaces the champion

Starts by itself when `train_ppo` registers a candidate; by hand, give the registered model and a version. Both models
are evaluated on the same prompts with the same seeds, the gate of the run's preset judges, a person approves (or the
policy, when the preset says `automatic`), and the alias `champion` moves. A candidate that does not get through keeps
the reason as tags.
"""

PARAMS = {
    "model": Param("", type=["null", "string"], title="Registered model"),
    "version": Param("candidate", type=["null", "string"], title="Version", description="A number or an alias."),
}

with DAG(
    "review_candidate", params=PARAMS, schedule=[CANDIDATE], catchup=False, max_active_runs=8, doc_md=DOC,
    tags=["ratchet", "review"],
    default_args={"retries": 5, "retry_delay": timedelta(seconds=5), "retry_exponential_backoff": 2.0,
                  "max_retry_delay": timedelta(minutes=10)},
) as dag:
    load = PythonOperator(task_id="load", python_callable=review.load)
    evaluate = EngineOperator(
        task_id="evaluate", spec=review.compare_job, pool="gpus", pool_slots=deployment.pool_slots())
    gate = GoOnOperator(task_id="gate", decide=review.judge)
    approve = PolicyApprovalOperator(
        task_id="approve", policy=review.approval_policy,
        subject="Promote {{ ti.xcom_pull(task_ids='load')['model'] }} version "
                "{{ ti.xcom_pull(task_ids='load')['candidate'] }} to champion?",
        body="{{ ti.xcom_pull(task_ids='gate', key='evidence') }}")
    promote = PythonOperator(task_id="promote", python_callable=review.promote, outlets=[CHAMPION])
    # Runs only when the gate, a person or the time limit kept the promotion from running.
    reject = PythonOperator(task_id="reject", python_callable=review.reject, trigger_rule="all_skipped")

    load >> evaluate >> gate >> approve >> promote >> reject
