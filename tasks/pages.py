"""The plugin's pages below `/ratchet`, served by Airflow's API server behind Airflow's own login and permissions.

    /runs/DAG/RUN              the card of a run: result, links, verdict of the gate; in Airflow the tab `Ratchet`
    /runs/DAG/RUN/report       the report of a training run, with the verdict of its review
    /runs/DAG/RUN/log/TASK     the whole log of a task's engine job (`?attempt=1`: of an earlier attempt)

What they show comes from Airflow's database and RATCHET_STORE, logs from RATCHET_HOME.
"""

from typing import Any

from engine.errors import FaultError, MissingError, RefusedError
from engine.spec import RunResult
from engine.spec.job import LOG_FILE
from engine.store import join
from tasks import cards, deployment, jobs, links, notes, reports, runs, stages

HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "same-origin"}
CARD_POLICY = (f"default-src 'none'; style-src 'unsafe-inline'; script-src '{cards.SCRIPT_HASH}'; "
               "frame-ancestors 'self'")
REPORT_POLICY = ("default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'self'; "
                 "sandbox allow-popups allow-popups-to-escape-sandbox")
"""The report shows what models wrote: no script, and nothing of the page's own origin."""

Results = dict[str, dict[str, Any]]
"""By task, by key: what the tasks of a run pushed."""


def application() -> Any:
    """The FastAPI application that Airflow mounts.

    A mounted application is not protected by Airflow: every page asks for a logged-in user who may read the DAG's runs
    (or logs) itself. There is no page without, not even one that describes the others.
    """
    from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity
    from airflow.api_fastapi.core_api.security import requires_access_dag
    from fastapi import Depends, FastAPI

    app = FastAPI(title="Ratchet", openapi_url=None)
    for path, show, entity in (
            ("", show_card, DagAccessEntity.RUN), ("/report", show_report, DagAccessEntity.RUN),
            ("/log/{task_id}", show_log, DagAccessEntity.TASK_LOGS)):
        app.get(f"/runs/{{dag_id}}/{{run_id}}{path}", response_model=None,
                dependencies=[Depends(requires_access_dag("GET", entity))])(show)
    for error in (RefusedError, FaultError):
        app.add_exception_handler(error, lambda request, raised: _text(f"{type(raised).__name__}: {raised}", 500))
    return app


def show_card(dag_id: str, run_id: str) -> Any:
    """The card of a run of `train_ppo`, or of a run that reviews one's candidate."""
    results = read_results(dag_id, run_id)
    return _html(cards.page(card_of(dag_id, run_id, results)), CARD_POLICY)


def show_report(dag_id: str, run_id: str) -> Any:
    """The report as the engine wrote it, with the verdict of the review."""
    page = reports.read_report(runs.run_root(dag_id, run_id))
    if page is None:
        return _text(f"There is no report of {run_id} yet: task `report` writes it when the last stage has ended.", 404)
    return _html(page, REPORT_POLICY)


def show_log(dag_id: str, run_id: str, task_id: str, attempt: int | None = None, map_index: int = -1) -> Any:
    """The log of a job, as far as it is written."""
    from fastapi.responses import FileResponse

    directory = jobs.job_directory(deployment.home(), dag_id, run_id, task_id, map_index)
    file = directory / LOG_FILE if attempt is None else directory / "attempts" / str(attempt) / LOG_FILE
    if not file.is_file():
        return _text(f"There is no {file}. Either the job has not started, or this API server does not see the "
                     "workers' RATCHET_HOME; the task's own log in Airflow has what the engine said.", 404)
    return FileResponse(file, media_type="text/plain", headers=HEADERS)


def card_of(dag_id: str, run_id: str, results: Results) -> cards.Card:
    """What is known of a run, from what its tasks pushed and from the run's files."""
    said = tuple(pushed[notes.NOTE] for pushed in results.values() if notes.NOTE in pushed)
    begun, loaded = (results.get(task, {}).get("return_value") or {} for task in ("begin", "load"))
    root = runs.run_root(dag_id, run_id) if begun else str(loaded.get("run_uri", ""))
    # XComs can be written over Airflow's API: they may not lead out of the store.
    if not root.startswith(join(deployment.store(), "runs") + "/") or ".." in root:
        return cards.Card(title=f"{dag_id}: nothing to show yet" if said else
                          f"{dag_id}: no training run of Ratchet has begun here", said=said)
    file = runs.read_run(root)
    if loaded:
        results = read_results(file.dag_id, file.run_id)
    return cards.Card(
        title=f"{file.pipeline.registry.model}: {file.pipeline.train_numbers.algorithm.kind}",
        links=_links(file, root, training=not loaded),
        facts={"preset": file.preset, "started from": file.base_version or file.base_model, "run": file.run_id,
               "candidate": _candidate(root)},
        models=models_of(results), said=said, verdict=runs.read_review(root))


def models_of(results: Results) -> dict[str, dict[str, float]]:
    """The base model and every stage that was evaluated, with the metrics of the evaluation."""
    found = {task: RunResult.model_validate(pushed["return_value"]) for task, pushed in results.items()
             if task.endswith(".evaluate") and pushed.get("return_value")}
    by_stage = stages.evaluations_of(found)
    return {stages.stage_name(stage).replace("_", " ") if stage else "base": by_stage[stage]
            for stage in sorted(by_stage)}


def read_results(dag_id: str, run_id: str) -> Results:
    """What the tasks of a run pushed, oldest task first."""
    from airflow.models.xcom import XComModel
    from airflow.utils.session import create_session

    query = XComModel.get_many(run_id=run_id, dag_ids=dag_id).order_by(None).order_by(XComModel.timestamp)
    with create_session() as session:
        rows = session.execute(query.with_only_columns(XComModel.task_id, XComModel.key, XComModel.value)).all()
    results: Results = {}
    for task, key, value in rows:
        results.setdefault(task, {})[key] = notes.read_xcom(value)
    return results


def _links(file: runs.RunFile, root: str, *, training: bool) -> dict[str, str]:
    shown = {"MLflow run": file.mlflow_url, "Report": links.report(file.dag_id, file.run_id)}
    if not training:
        shown["Training run"] = links.run_page(file.dag_id, file.run_id)
    candidate = _candidate(root)
    if candidate and "/#/" in file.mlflow_url:
        model, _, version = candidate.rpartition("/")
        shown["Candidate"] = f"{file.mlflow_url.partition('/#/')[0]}/#/models/{model}/versions/{version}"
    return shown


def _candidate(root: str) -> str:
    try:
        made = runs.read_candidate(root)
    except MissingError:
        return ""
    return f"{made.model}/{made.version}"


def _html(text: str, policy: str) -> Any:
    from fastapi.responses import HTMLResponse

    return HTMLResponse(text, headers={**HEADERS, "Content-Security-Policy": policy})


def _text(text: str, status: int) -> Any:
    from fastapi.responses import PlainTextResponse

    return PlainTextResponse(text + "\n", status_code=status, headers=HEADERS)
