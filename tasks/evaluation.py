"""What the tasks of `evaluate_model` do: find model and prompts, describe the job, close the MLflow run."""

import json
import os
from typing import Any

from airflow.sdk.definitions.context import Context

from engine.errors import DataError, ModelError, SpecError
from engine.layout import check_generation_layout, read_model_shape
from engine.spec import EvaluateSpec, RewardModelReward, RunResult, hash_spec
from engine.store import MANIFEST, exists, is_s3, join, read_text
from tasks import deployment, links, pipeline, registry, runs, stages, tracking
from tasks.operators import airflow_errors

NAME = "eval"
"""What the evaluation calls the model, so that MLflow shows its metrics as `eval/...`, beside those of other runs."""


def begin(**context: Any) -> dict[str, str]:
    """Check model, prompts and preset, open the MLflow run, write the run's file."""
    with airflow_errors():
        params, ti = context["params"], context["ti"]
        plan = pipeline.parse_pipeline(pipeline.read_preset(deployment.presets(), params["preset"]))
        uri, version = find_model(params["model"].strip(), params.get("version") or registry.CHAMPION)
        if uses_trained_reward(plan) and version is None:
            raise SpecError(f"preset: {params['preset']} scores with the reward model that a run trains, and {uri} is "
                            "of no run; choose a registered version or another preset")
        check_model(plan, uri)
        prompts_hash = check_prompts(params["prompts"].strip())
        label = version.label if version else uri
        where = tracking.parent_run(
            plan.registry.experiment, f"{ti.dag_id}/{ti.run_id}", name=f"evaluate {label}", lineage=tracking.Lineage(
                git_sha=tracking.git_sha(), base_model=label, spec_hash=hash_spec(plan), data_hash=prompts_hash,
                airflow_dag_id=ti.dag_id, airflow_run_id=ti.run_id, airflow_url=links.run_page(ti.dag_id, ti.run_id)))
        if where is None:
            raise SpecError("MLFLOW_TRACKING_URI is not set, so there is nowhere to put the result; set it for the "
                            "workers")
        # For a registered version: where the reward model of its run is, if the preset scores with that.
        made_in = version.tags.get("ratchet.run", "") if version else ""
        runs.write_run(runs.run_root(ti.dag_id, ti.run_id), runs.RunFile(
            pipeline=plan, preset=params["preset"], base_model=uri, base_version=version.label if version else "",
            tracking=where, dag_id=ti.dag_id, run_id=ti.run_id))
        return {"model": label, "uri": uri, "made_in": made_in, "mlflow": tracking.run_url(where)}


def find_model(model: str, version: str) -> tuple[str, registry.Version | None]:
    """URI of the model's directory, and its registry version when `model` is the name of a registered model.

    Raises:
        SpecError: the registry has no such version. ModelError: no such directory, or a version without one.
    """
    if "/" in model:
        if not is_s3(model) and not os.path.isdir(model):
            raise ModelError(f"model: {model} is not a directory; give a Hugging Face directory by its absolute path, "
                             "or the name of a registered model")
        return model, None
    found = registry.read(model, version)
    if found is None:
        raise SpecError(f"version: the registry has no {model}/{version}")
    if not found.export_uri:
        raise ModelError(f"{found.label} has no tag ratchet.export; set the tag to its Hugging Face directory")
    return found.export_uri, found


def uses_trained_reward(plan: pipeline.Pipeline) -> bool:
    """Whether the preset's evaluation scores with a reward model of its own run."""
    return any(isinstance(reward, RewardModelReward) and reward.model == pipeline.TRAINED
               for reward in plan.evaluate_numbers.rewards)


def check_model(plan: pipeline.Pipeline, uri: str) -> None:
    """Refuse a model that is gone, or that the preset's layout does not divide. On S3 the engine looks."""
    if is_s3(uri):
        return
    if not os.path.isdir(uri):
        raise ModelError(f"model: {uri} is not there any more; train or export it again")
    check_generation_layout(read_model_shape(uri), plan.evaluate_numbers.layout)


def check_prompts(uri: str) -> str:
    """The sha256 of the held-out prompts in a prepared set.

    Raises:
        DataError: not the output of a prepare stage, or one without held-out prompts.
    """
    where = join(uri, MANIFEST)
    if not exists(where):
        raise DataError(f"prompts: {where} is not there; give the output directory of a `prepare` task")
    sets = json.loads(read_text(where)).get("sets", {})
    if "eval" not in sets:
        raise DataError(f"prompts: {uri} has no held-out set `eval`; it has {', '.join(sorted(sets)) or 'none'}")
    return sets["eval"]["sha256"]


def job(context: Context) -> EvaluateSpec:
    """The evaluation, with the settings that stages and reviews of the preset use, so that they share the cache."""
    ti = context["ti"]
    root = runs.run_root(ti.dag_id, ti.run_id)
    file = runs.read_run(root)
    run = stages.Run(pipeline=file.pipeline, root=ti.xcom_pull(task_ids="begin")["made_in"] or root,
                     evaluations=runs.evaluation_cache(), base_model=file.base_model, results={},
                     tracking=file.tracking)
    return stages.comparison_spec(run, {NAME: file.base_model}, prompts=context["params"]["prompts"].strip())


def result(**context: Any) -> dict[str, Any]:
    """End the MLflow run; what was found, small."""
    with airflow_errors():
        ti = context["ti"]
        file = runs.read_run(runs.run_root(ti.dag_id, ti.run_id))
        done = RunResult.model_validate(ti.xcom_pull(task_ids="evaluate"))
        tracking.finish_run(file.tracking, status="FINISHED")  # the engine has logged the metrics
        begun = ti.xcom_pull(task_ids="begin")
        scores = {name: value for name, value in done.metrics.items() if name.count("/") == 1}
        return {"model": begun["model"], "uri": begun["uri"], "mlflow": begun["mlflow"],
                "evaluation": done.outputs["evaluation"], "samples": done.outputs["samples"], "metrics": scores}
