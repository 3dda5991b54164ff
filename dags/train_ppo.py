"""DAG `train_ppo`: prepare >> sft >> reward_model, dpo >> stage 1..N >> register the candidate, write the report."""

from datetime import timedelta
from functools import partial

from airflow.providers.standard.operators.python import PythonOperator
from airflow.sdk import DAG, Param, TaskGroup

from tasks import deployment, stages, training
from tasks.assets import CANDIDATE
from tasks.operators import EngineOperator, GoOnOperator
from tasks.pipeline import FINETUNED, preset_names

DOC = """
### Train a model with reinforcement learning and register the result as a candidate

Choose a **preset** and trigger; every other field left empty keeps the preset's value. The run prepares the prompts,
fine-tunes (**sft**), trains a **reward model** and runs **dpo** where the preset has these sections, trains in
**stages** (each: train, evaluate on held-out prompts, decide whether to go on) and registers the last stage's model as
`candidate`, which starts `review_candidate`. What is not needed is skipped.

A task that fails because something outside broke is tried again and goes on from its last checkpoint. A task that was
*refused* (exit 2) or ended with bad *numerics* (exit 4) is not: read its log's last line. Mark a task failed to stop
its engine.
"""

PARAMS = {
    "preset": Param(
        "tiny", enum=preset_names(deployment.presets()) or ["tiny"], title="Preset", section="What",
        description="A file of `examples/`: model, prompts, algorithm, layout, gate."),
    "model": Param(
        None, type=["null", "string"], title="Model", section="What",
        description="Hugging Face directory or s3:// to start from, instead of the preset's."),
    "start_from": Param(
        None, enum=[None, "base", "champion"], type=["null", "string"], title="Start from", section="What",
        description="`champion`: train the model in production further."),
    "stages": Param(
        None, type=["null", "integer"], minimum=1, maximum=deployment.max_stages(), title="Stages", section="How long",
        description="Stages at most."),
    "iterations": Param(
        None, type=["null", "integer"], minimum=1, title="Iterations", section="How long",
        description="Iterations of one stage."),
    "lr": Param(
        None, type=["null", "number"], exclusiveMinimum=0, title="Learning rate", section="How",
        description="Peak learning rate of the actor."),
    "seed": Param(
        None, type=["null", "integer"], minimum=0, title="Seed", section="How",
        description="Same seed, same spec, same weights."),
    "approval": Param(
        None, enum=[None, "human", "automatic"], type=["null", "string"], title="Approval", section="Review",
        description="`automatic`: a passed gate promotes without a person."),
    "override": Param(
        "", type=["null", "string"], format="multiline", title="YAML override", section="Advanced",
        description="Put over the preset and the form, for example `train: {actor: {lr: 1.0e-5}}`; checked before "
                    "anything starts."),
    "force": Param(
        False, type="boolean", title="Replace jobs", section="Advanced",
        description="When this run's tasks are cleared after its preset changed: replace jobs that hold another spec."),
}

RETRIES = {"retries": 10, "retry_delay": timedelta(seconds=5), "retry_exponential_backoff": 2.0,
           "max_retry_delay": timedelta(minutes=10), "on_failure_callback": training.failed}
ON_GPUS = {"pool": "gpus", "pool_slots": deployment.pool_slots()}

with DAG(
    "train_ppo", params=PARAMS, schedule=None, catchup=False, max_active_runs=1, default_args=RETRIES, doc_md=DOC,
    tags=["ratchet", "training"], render_template_as_native_obj=False,
) as dag:
    begin = PythonOperator(task_id="begin", python_callable=training.begin)
    prepare = EngineOperator(task_id="prepare", spec=partial(training.job, build=stages.prepare_spec))
    register = PythonOperator(
        task_id="register", python_callable=training.register, outlets=[CANDIDATE],
        trigger_rule="none_failed_min_one_success")
    report = EngineOperator(task_id="report", spec=training.report_job, trigger_rule="none_failed_min_one_success")
    sft, reward_model, dpo = (
        EngineOperator(task_id=section, **ON_GPUS, spec=partial(training.finetune_job, section=section),
                       trigger_rule="none_failed")
        for section in FINETUNED)
    begin >> prepare >> sft >> [reward_model, dpo]
    before = [reward_model, dpo]

    for stage in range(1, deployment.max_stages() + 1):
        with TaskGroup(f"stage_{stage}"):
            train = EngineOperator(
                task_id="train", **ON_GPUS, trigger_rule="none_failed" if stage == 1 else "all_success", spec=partial(
                    training.job, build=stages.train_spec, stage=stage,
                    needs=("prepare", *([stages.train_task(stage - 1)] if stage > 1 else []))))
            evaluate = EngineOperator(
                task_id="evaluate", **ON_GPUS, spec=partial(
                    training.job, build=stages.evaluate_spec, stage=stage, needs=("prepare", stages.train_task(stage))))
            before >> train >> evaluate >> [register, report]
            if stage < deployment.max_stages():
                before = GoOnOperator(task_id="go_on", decide=partial(training.go_on, stage=stage))
                evaluate >> before
