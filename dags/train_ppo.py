"""DAG `train_ppo`: prepare >> sft >> reward_model, dpo >> stage 1..N >> register the candidate, write the report."""

from functools import partial

from airflow.sdk import DAG, Param, TaskGroup

from engine.spec.algorithm import ALGORITHMS
from tasks import deployment, stages, training
from tasks.assets import CANDIDATE
from tasks.operators import RETRIES, EngineOperator, GoOnOperator, RegisterOperator, StepOperator
from tasks.pipeline import FINETUNED, preset_names

DOC = """
### Train a model with reinforcement learning and register the result as a candidate

Choose a **preset** and trigger. A field that is left empty keeps the preset's value.

| task | does | takes GPUs |
|---|---|---|
| `begin` | checks the whole form, the model and the deployment; opens the MLflow run | |
| `prepare` | freezes prompts, demonstrations and pairs | |
| `sft`, `reward_model`, `dpo` | fine-tune before RL, where the preset has these sections | yes |
| `stage_N.train` | some iterations of RL, from where the stage before ended | yes |
| `stage_N.evaluate` | the model on held-out prompts, beside the one it started from | yes |
| `stage_N.go_on` | is another stage worth it? | |
| `register` | makes the last stage's model the `candidate`: this starts `review_candidate` | |
| `report` | curves, answers before and after, time and cost | |

What is not needed is skipped. One run at a time; the next waits.

**Where to look.** The run's note says what came out, or why it failed. The tab **Ratchet** of the run has the result,
the verdict of the review and all links; every task has links to its MLflow run, the report and the log of its job.

**When a task fails.** A fault from outside (a lost process, a store, a full disk) is tried again and goes on from the
last checkpoint. A task that was *refused* (exit 2) or ended with bad *numerics* (exit 4) is not: read the note, change
the form and trigger again. To try one stage again, clear its task. To stop an engine, mark its task failed.
"""

UNSET = {"type": ["null", "string"]}
PARAMS = {
    "preset": Param(
        "tiny", enum=preset_names(deployment.presets()) or ["tiny"], title="Preset", section="What",
        description="A file of the presets' folder (`examples/`): model, prompts, algorithm, layout, gate. The fields "
                    "below change it for this run."),
    "model": Param(
        None, **UNSET, title="Model", section="What",
        description="Hugging Face directory or `s3://` to start from. Empty: the preset's."),
    "start_from": Param(
        None, **UNSET, enum=[None, "base", "champion"], title="Start from", section="What",
        description="`base`: the model above. `champion`: train the model in production further. Empty: as the preset "
                    "says."),
    "algorithm": Param(
        None, **UNSET, enum=[None, *ALGORITHMS], title="Algorithm", section="How",
        description="Another one than the preset's comes with the settings of its paper; give others in the override. "
                    "`safe_rlhf` needs its `costs` there. Empty: the preset's."),
    "lr": Param(
        None, type=["null", "number"], exclusiveMinimum=0, maximum=1, title="Learning rate", section="How",
        description="Peak learning rate of the actor, above 0 and at most 1; usual are 1e-6 for a large model and 1e-3 "
                    "for a tiny one. Empty: the preset's."),
    "seed": Param(
        None, type=["null", "integer"], minimum=0, maximum=2**32 - 1, title="Seed", section="How",
        description="0 to 4294967295. The same seed and settings give the same weights. Empty: the preset's."),
    "stages": Param(
        None, type=["null", "integer"], minimum=1, maximum=deployment.max_stages(), title="Stages", section="How long",
        description=f"Stages at most, 1 to {deployment.max_stages()}; after each the model is evaluated. Empty: the "
                    "preset's."),
    "iterations": Param(
        None, type=["null", "integer"], minimum=1, maximum=1_000_000, title="Iterations", section="How long",
        description="Iterations of one stage (generate, score, update), at least 1. Empty: the preset's."),
    "approval": Param(
        None, **UNSET, enum=[None, "human", "automatic"], title="Approval", section="Review",
        description="`human`: a person decides in Airflow or MLflow. `automatic`: a passed gate promotes. Empty: as "
                    "the preset says."),
    "override": Param(
        "", type=["null", "string"], format="multiline", title="YAML override", section="Advanced",
        description="Put over the preset and the form, for example `train: {actor: {lr: 1.0e-5}}` or "
                    "`train: {algorithm: {kind: grpo, samples_per_prompt: 4}, critic: null}`. Checked against the "
                    "schema before anything starts; an error is in the log of `begin` and in the run's note."),
    "force": Param(
        False, type="boolean", title="Replace jobs", section="Advanced",
        description="When this run's tasks are cleared after its preset changed: replace jobs that hold another spec. "
                    "Their checkpoints are put aside; those in an object store are deleted."),
}

ON_GPUS = {"pool": "gpus", "pool_slots": deployment.pool_slots()}

with DAG(
    "train_ppo", params=PARAMS, schedule=None, catchup=False, max_active_runs=1, doc_md=DOC,
    tags=["ratchet", "training"], render_template_as_native_obj=False,
    default_args=RETRIES | {"on_failure_callback": training.failed},
) as dag:
    begin = StepOperator(task_id="begin", python_callable=training.begin)
    prepare = EngineOperator(task_id="prepare", spec=partial(training.job, build=stages.prepare_spec))
    register = RegisterOperator(
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
