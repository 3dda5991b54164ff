"""What the task of `rollback` does: restore an earlier champion and announce it."""

from typing import Any

from engine.store import hash_model_dir
from tasks import notes, registry
from tasks.operators import airflow_errors
from tasks.review import announce, registry_conflicts


def roll_back(**context: Any) -> dict[str, str]:
    """Make an earlier champion the champion again, in the name of whoever started the run."""
    params, ti = context["params"], context["ti"]
    decision = registry.Decision(
        by=started_by(context), reason=params["reason"].strip(), url=f"{ti.dag_id}/{ti.run_id}")
    with airflow_errors(), registry_conflicts():
        restored = registry.rollback(
            params["model"].strip(), decision, hash_files=hash_model_dir, to=params.get("version") or None)
    announced = announce(context, restored)
    notes.say(context, f"**{restored.label}** is the champion again: {decision.reason} ({decision.by})")
    return {**announced, "left": restored.tags.get("ratchet.restored_from", ""), "by": decision.by}


def started_by(context: Any) -> str:
    """Who started the DAG run: Airflow's name of the user; `airflow` when it was not a person."""
    return getattr(context["dag_run"], "triggering_user_name", None) or "airflow"
