"""What the tasks of `train_ppo` do besides running engine jobs: begin, describe the jobs, register the candidate."""

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from airflow.sdk.definitions.context import Context

from engine.errors import FaultError, ModelError, SpecError
from engine.layout import check_generation_layout, check_layout, read_model_shape
from engine.spec import FinetuneSpec, ReportSpec, RunResult, RunSpec, TrackingSpec, hash_spec
from engine.store import is_s3
from tasks import deployment, jobs, lineage, links, notes, pipeline, registry, runs, stages, tracking
from tasks.assets import announce_candidate
from tasks.operators import airflow_errors, skip


def begin(**context: Any) -> dict[str, str]:
    """Check everything that can be checked before a process starts, open the MLflow run, write the run's file."""
    with airflow_errors():
        params, ti = context["params"], context["ti"]
        plan = stages.resolve(
            pipeline.read_preset(deployment.presets(), params["preset"]),
            stages.Form(**{name: params.get(name) for name in stages.Form.__dataclass_fields__}),
            pipeline.read_yaml(params.get("override") or "", "override"))
        if plan.stages.count > deployment.max_stages():
            raise SpecError(f"stages.count: {plan.stages.count} stages, but this deployment's DAG has "
                            f"{deployment.max_stages()}; choose fewer, or set RATCHET_MAX_STAGES for all of Airflow")
        base, version = base_model(plan)
        check_model(plan, base)
        deployment.engine_python()
        parent = tracking.parent_run(
            plan.registry.experiment, f"{ti.dag_id}/{ti.run_id}", name=f"{params['preset']} {ti.run_id}",
            lineage=tracking.Lineage(
                git_sha=tracking.git_sha(), base_model=version or base, spec_hash=hash_spec(plan),
                airflow_dag_id=ti.dag_id, airflow_run_id=ti.run_id, airflow_url=links.run_page(ti.dag_id, ti.run_id)))
        if parent is None:
            raise SpecError("MLFLOW_TRACKING_URI is not set, so there is no registry; set it for the workers")
        root = runs.run_root(ti.dag_id, ti.run_id)
        runs.write_run(root, runs.RunFile(
            pipeline=plan, preset=params["preset"], base_model=base, base_version=version, tracking=parent,
            mlflow_url=tracking.run_url(parent), gpu_hour_price=deployment.gpu_hour_price(),
            dag_id=ti.dag_id, run_id=ti.run_id, force=bool(params.get("force"))))
        return {"root": root, "base_model": base, "mlflow": links.show_run(context, run_file(context))}


def base_model(plan: pipeline.Pipeline) -> tuple[str, str]:
    """URI of the model to start from, and its registry version (empty for the preset's base model)."""
    if plan.start_from == "champion":
        champion = registry.read(plan.registry.model, registry.CHAMPION)
        if champion is not None:
            return champion.export_uri, champion.label
    return stages.absolute_uri(plan.model, str(deployment.home())), ""


def check_model(plan: pipeline.Pipeline, uri: str) -> None:
    """Refuse a model that is not there, or that the layouts do not divide. On S3 the engine looks, after the download.

    Raises:
        ModelError, LayoutError.
    """
    if is_s3(uri):
        return
    if not os.path.isdir(uri):
        raise ModelError(f"model: {uri} is not a directory; make it, or give a Hugging Face directory")
    shape = read_model_shape(uri)
    train = plan.train_numbers
    for spec in (train, *map(plan.finetune_numbers, plan.finetuned)):
        check_layout(shape, spec.layout)
    check_generation_layout(shape, train.rollout.layout)
    check_generation_layout(shape, plan.evaluate_numbers.layout)


def run_file(context: Any) -> runs.RunFile:
    """The file of the run that a task belongs to."""
    return runs.read_run(runs.run_root(context["ti"].dag_id, context["ti"].run_id))


def job(context: Context, *, build: Callable[..., RunSpec], needs: tuple[str, ...] = (),
        stage: int | None = None) -> RunSpec:
    """The spec of one of the run's jobs.

    Args:
        context: of the task.
        build: makes the spec from a `stages.Run` (and the stage): pure.
        needs: tasks whose results it needs.
        stage: number of the stage, for the jobs of one; they share its MLflow run.
    """
    file = run_file(context)
    where = TrackingSpec() if stage is None else stage_run(file, stages.stage_name(stage))
    links.show_run(context, file, where.run_id)
    run = view(file, context, needs, where)
    return build(run) if stage is None else build(run, stage)


def finetune_job(context: Context, *, section: str) -> FinetuneSpec:
    """The spec of a section of the finetune stage.

    Raises:
        AirflowSkipException: the pipeline has no such section.
    """
    file = run_file(context)
    if section not in file.pipeline.finetuned:
        skip(f"preset {file.preset} has no section {section}")
    where = stage_run(file, section)
    links.show_run(context, file, where.run_id)
    return stages.finetune_spec(view(file, context, ("prepare",), where), section)


def stage_run(file: runs.RunFile, name: str) -> TrackingSpec:
    """The MLflow run of a stage or section."""
    return tracking.stage_run(file.tracking, name, lineage=tracking.Lineage(
        base_model=file.base_version or file.base_model, airflow_dag_id=file.dag_id, airflow_run_id=file.run_id))


def report_job(context: Context) -> ReportSpec:
    """The spec of the run's report."""
    file = run_file(context)
    links.show_run(context, file)
    tasks = ("prepare", *file.pipeline.finetuned, *stage_tasks(file.pipeline))
    run = view(file, context, tasks, file.tracking)
    where = {task: str(jobs.job_directory(deployment.home(), file.dag_id, file.run_id, task)) for task in tasks}
    facts = {"preset": file.preset, "run": file.run_id, "code": tracking.git_sha(), "MLflow": file.mlflow_url,
             "Airflow": links.run_page(file.dag_id, file.run_id)}
    return stages.report_spec(run, where, {name: text for name, text in facts.items() if text}, file.gpu_hour_price)


def stage_tasks(plan: pipeline.Pipeline) -> tuple[str, ...]:
    """Task ids of all jobs of the stages that may have run."""
    count = min(plan.stages.count, deployment.max_stages())
    return tuple(name(k) for k in range(1, count + 1) for name in (stages.train_task, stages.evaluate_task))


def go_on(context: Context, *, stage: int) -> stages.Decision:
    """Whether another stage follows this one."""
    file = run_file(context)
    links.show_run(context, file)
    needed = tuple(stages.evaluate_task(k) for k in range(max(1, stage - 1), stage + 1))
    run = view(file, context, needed, TrackingSpec())
    return stages.decide(file.pipeline, stage, stages.evaluations_of(run.results))


def register(**context: Any) -> dict[str, Any]:
    """Register the model of the last stage as the candidate and announce it: the asset event starts the review."""
    with airflow_errors():
        root = runs.run_root(context["ti"].dag_id, context["ti"].run_id)
        file = run_file(context)
        links.show_run(context, file)
        run = view(file, context, ("prepare", *stage_tasks(file.pipeline)), file.tracking)
        last = stages.last_stage(file.pipeline, stages.evaluations_of(run.results))
        train, evaluation = run.results[stages.train_task(last)], run.results[stages.evaluate_task(last)]
        export = stages.output(run, stages.train_task(last), "export")
        name = file.pipeline.registry.model
        champion = registry.read(name, registry.CHAMPION)
        version = registry.register_candidate(name, registry.CandidateFiles(
            export_uri=export, weights_hash=train.hashes["weights"], run_id=file.tracking.run_id or "",
            spec_hash=train.hashes.get("spec", ""), prompts_hash=evaluation.hashes.get("prompts", ""), run_uri=root,
            base="" if champion is None else champion.version, metrics=evaluation.metrics))
        runs.write_candidate(root, runs.CandidateFile(
            model=name, version=version.version, stage=last, export_uri=export, weights_hash=version.weights_hash,
            prompts=stages.output(run, "prepare", "prompts"), training=train.metrics))
        lineage.record(file, version)
        tracking.finish_run(file.tracking, status="FINISHED", metrics=evaluation.metrics)
        for part in (*file.pipeline.finetuned, *(stages.stage_name(stage) for stage in range(1, last + 1))):
            tracking.finish_run(stage_run(file, part), status="FINISHED")
        announcement = announce_candidate(context, name, version.version, root)
        notes.say(context, result_note(file, version.label, last, stages.evaluations_of(run.results)))
        return {**announcement, "stage": last}


def result_note(file: runs.RunFile, candidate: str, last: int, evaluations: Mapping[int, Mapping[str, float]]) -> str:
    """What a run made, for its note: one sentence and where to read on."""
    metric = file.pipeline.stages.metric
    before, after = evaluations.get(0, {}).get(metric), evaluations[last].get(metric)
    change = "" if before is None or after is None else f": {metric} {before:.4g} → {after:.4g} on held-out prompts"
    found = {"MLflow": file.mlflow_url, "report": links.report(file.dag_id, file.run_id)}
    where = ", ".join(f"[{name}]({address})" for name, address in found.items() if address)
    return f"candidate **{candidate}** from stage {last}{change}. {where}"


def failed(context: Context) -> None:
    """A task that will not be tried again: its error goes to the run's note, and the MLflow run ends as failed.

    When the task is cleared, the MLflow run opens again, and the next end of the run writes the note anew.
    """
    notes.failed(context)
    with contextlib.suppress(FaultError):  # no run yet, or no MLflow: the task's own error is what matters
        tracking.finish_run(run_file(context).tracking, status="FAILED")


def view(file: runs.RunFile, context: Context, needs: tuple[str, ...], where: TrackingSpec) -> stages.Run:
    """The run as its jobs see it: with the results of the tasks in `needs` that have one."""
    results = {}
    for task in needs:
        found = context["ti"].xcom_pull(task_ids=task)
        if found is not None:
            results[task] = RunResult.model_validate(found)
    return stages.Run(pipeline=file.pipeline, root=runs.run_root(file.dag_id, file.run_id),
                      evaluations=runs.evaluation_cache(), base_model=file.base_model, results=results, tracking=where)
