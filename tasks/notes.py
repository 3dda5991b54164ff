"""The note of a DAG run: what its tasks said of the result, or why it failed.

Workers have no way to write a note. So a task says its sentence as an XCom, and a listener in Airflow's scheduler makes
the note of them when the run ends. No credentials are needed anywhere.
"""

from typing import Any

from airflow.listeners import hookimpl

NOTE = "note"
"""XCom key of what a task says."""
SIGN = "**Ratchet:** "
"""Begins our part of a note; what a person wrote before it stays."""
LIMIT = 1000
"""Characters that Airflow's column holds."""
TAG = "ratchet"
"""Of the DAGs whose failures are noted even when the task could not say anything."""


def say(context: Any, sentence: str) -> None:
    """From a task: a sentence for the run's note. Markdown."""
    context["ti"].xcom_push(key=NOTE, value=sentence)


def failed(context: Any) -> None:
    """Callback of a task that is not tried again: its error goes to the run's note."""
    error = context.get("exception")
    if error is not None:
        say(context, f"`{context['ti'].task_id}` failed: {error}")


def compose(old: str | None, sentences: list[str]) -> str:
    """The new note: what people wrote in the old one, then ours."""
    theirs = (old or "").partition(SIGN)[0].rstrip()
    before = f"{theirs}\n\n" if theirs else ""
    text = before + SIGN + "\n\n".join(sentences)
    return text if len(text) <= LIMIT else text[: LIMIT - 1] + "…"


class NoteListener:
    """Writes the note when a run ends; called by Airflow's scheduler, or its API server when a person ends the run."""

    @hookimpl
    def on_dag_run_success(self, dag_run: Any, msg: str) -> None:
        """Note the result."""
        _write(dag_run, _said(dag_run))

    @hookimpl
    def on_dag_run_failed(self, dag_run: Any, msg: str) -> None:
        """Note what failed."""
        tags = getattr(dag_run.dag, "tags", None) or ()
        _write(dag_run, _said(dag_run) or ([f"{msg.replace('_', ' ')}; see the log of what failed"]
                                           if TAG in tags else []))


def _said(dag_run: Any) -> list[str]:
    from airflow.models.xcom import XComModel
    from sqlalchemy.orm import object_session

    session = object_session(dag_run)
    if session is None:
        return []
    query = XComModel.get_many(run_id=dag_run.run_id, dag_ids=dag_run.dag_id, key=NOTE)
    rows = session.scalars(query.with_only_columns(XComModel.value).order_by(None).order_by(XComModel.timestamp))
    return [read_xcom(value) for value in rows]


def read_xcom(value: Any) -> Any:
    """What a task pushed, from the database's column."""
    import json

    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _write(dag_run: Any, sentences: list[str]) -> None:
    if sentences:
        dag_run.note = compose(dag_run.note, sentences)
