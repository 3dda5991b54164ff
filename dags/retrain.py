"""DAG `retrain`: choose what landed and was not trained on >> train from the champion >> record how it ended."""

from airflow.providers.standard.operators.python import PythonOperator
from airflow.sdk import DAG, Param

from tasks import deployment, retrain
from tasks.operators import RETRIES
from tasks.pipeline import preset_names

DOC = """
### Train the champion further on what has landed

Runs when prompts land (asset `prompts`) and, with `RATCHET_RETRAIN_CRON`, by the clock. It starts one run of
`train_ppo` with the preset `RATCHET_RETRAIN_PRESET`, from the champion, on the preset's own training prompts and the
files that landed since the last training that registered a candidate.

**choose** is skipped when nothing is new or when another training is active; its log says which. **train** waits
without a worker. **record** is failed when the training registered no candidate: its files are tried again by a later
run, in smaller company, and given up when they fail alone twice.
"""

PARAMS = {
    "preset": Param(
        deployment.retrain_preset(), enum=[None, *preset_names(deployment.presets())], type=["null", "string"],
        title="Preset", description="What to train, instead of this deployment's."),
}

with DAG(
    "retrain", params=PARAMS, schedule=retrain.schedule(), catchup=False, max_active_runs=1, doc_md=DOC,
    tags=["ratchet", "training"],
    default_args=RETRIES,
) as dag:
    # One at a time also over the runs of a backfill, which max_active_runs does not count.
    choose = PythonOperator(task_id="choose", python_callable=retrain.choose, max_active_tis_per_dag=1)
    train = retrain.TrainOperator(task_id="train")
    record = PythonOperator(task_id="record", python_callable=retrain.record)

    choose >> train >> record
