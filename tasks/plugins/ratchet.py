"""Airflow's plugin of Ratchet: a tab on every run of every DAG, pages behind Airflow's login, the note of a run.

Airflow finds it in the folder `[core] plugins_folder` (this file there, or a link to it), or by the entry point where
Ratchet is installed with `pip install -e`.
"""

from typing import Any
from urllib.parse import urlsplit

from airflow.plugins_manager import AirflowPlugin
from airflow.sdk.configuration import conf

from tasks.links import PREFIX
from tasks.notes import NoteListener

BELOW = urlsplit(conf.get("api", "base_url", fallback="")).path.rstrip("/")
"""Path that Airflow itself is served below."""


class RatchetPlugin(AirflowPlugin):
    """What Airflow's components take from us."""

    name = "ratchet"
    listeners = [NoteListener()]
    external_views = [{
        "name": "Ratchet", "destination": "dag_run", "url_route": "ratchet",
        "href": f"{BELOW}{PREFIX}/runs/{{DAG_ID}}/{{RUN_ID}}"}]

    @property
    def fastapi_apps(self) -> list[dict[str, Any]]:
        """The pages. Made when the API server asks: every task loads plugins, and needs no web framework."""
        from tasks.pages import application

        return [{"app": application(), "url_prefix": PREFIX, "name": "Ratchet"}]
