"""The assets that the DAGs tell each other about."""

from typing import Any

from airflow.sdk import Asset

PROMPTS = Asset("prompts", uri="ratchet://prompts")
"""Files of training prompts landed. `extra`: uris, sha256 (of each), rows (of all)."""
CANDIDATE = Asset("candidate", uri="ratchet://candidate")
"""A model version waits for its review; each is a partition. `extra`: model, version, run_uri."""
CHAMPION = Asset("champion", uri="ratchet://champion")
"""The model in production changed. `extra`: model, version, export_uri, weights_hash."""
MAX_KEY = 250
"""Characters that Airflow stores of a partition key."""


def announce_candidate(context: Any, model: str, version: str, run_uri: str) -> dict[str, str]:
    """Have the task announce a candidate when it succeeds; the task must have CANDIDATE as outlet.

    The version is the partition key, so that each is reviewed in a run of its own: of events without one that come at
    the same moment Airflow 3.3 gives the run the first and loses the others (apache/airflow#56050, #70972).
    """
    announcement = {"model": model, "version": version, "run_uri": run_uri}
    event = context["outlet_events"][CANDIDATE]
    event.extra = announcement
    event.add_partitions(f"{model}/{version}"[-MAX_KEY:])
    return announcement
