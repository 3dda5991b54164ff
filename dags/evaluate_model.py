"""DAG `evaluate_model`: any model on any prepared prompts, with the evaluation settings of a preset."""

from airflow.providers.standard.operators.python import PythonOperator
from airflow.sdk import DAG, Param

from tasks import deployment, evaluation, training
from tasks.operators import RETRIES, EngineOperator
from tasks.pipeline import preset_names

DOC = """
### Evaluate a model

A version or alias of a registered model, or a Hugging Face directory, on the held-out prompts of any prepared set (the
directory `prompts` of a run), with the rewards, lengths, samples and seed of a preset's `evaluate` section. What was
evaluated before with the same weights, prompts and settings is not generated again. The result is an MLflow run of the
preset's experiment, its metrics named `eval/...`, and the value that the task `result` returns.
"""

PARAMS = {
    "model": Param(type="string", minLength=1, title="Model",
                   description="Name of a registered model; or a Hugging Face directory: an absolute path or s3://."),
    "version": Param("champion", type=["null", "string"], title="Version",
                     description="Number or alias, for a registered model."),
    "prompts": Param(type="string", minLength=1, title="Prompts",
                     description="Output directory of a `prepare` task: a path or s3://."),
    "preset": Param("tiny", enum=preset_names(deployment.presets()) or ["tiny"], title="Preset",
                    description="Whose `evaluate` section is used."),
}

with DAG(
    "evaluate_model", params=PARAMS, schedule=None, catchup=False, max_active_runs=8, doc_md=DOC,
    tags=["ratchet", "evaluation"],
    default_args=RETRIES | {"on_failure_callback": training.failed},
) as dag:
    begin = PythonOperator(task_id="begin", python_callable=evaluation.begin)
    evaluate = EngineOperator(
        task_id="evaluate", spec=evaluation.job, pool="gpus", pool_slots=deployment.pool_slots())
    result = PythonOperator(task_id="result", python_callable=evaluation.result)

    begin >> evaluate >> result
