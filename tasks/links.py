"""Where a person finds what belongs to a run: addresses, and the links that a task shows in Airflow's UI."""

from typing import Any
from urllib.parse import quote

from airflow.sdk import BaseOperatorLink
from airflow.sdk.configuration import conf

PREFIX = "/ratchet"
"""Of the plugin's pages, below Airflow's address."""


class TaskLink(BaseOperatorLink):
    """A link whose address the task tells by `show`; Airflow keeps it as an XCom, so it works while the task runs."""

    name = ""
    xcom_key = ""

    def __init__(self, name: str, xcom_key: str):
        """Args: name: on the button."""
        self.name, self.xcom_key = name, xcom_key

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """What `show` was given; empty (no link) when it was not."""
        return vars(operator).get(self.xcom_key, "")


MLFLOW = TaskLink("MLflow run", "link_mlflow")
REPORT = TaskLink("Report", "link_report")
JOB_LOG = TaskLink("Job log", "link_log")
LINKS = (MLFLOW, REPORT, JOB_LOG)


def show(context: Any, *addresses: tuple[TaskLink, str]) -> None:
    """Give links of the task that runs their addresses; at once, not only when it has ended."""
    for link, address in addresses:
        # Airflow asks `get_link` when the task ends and writes what it says over this.
        vars(context["task"])[link.xcom_key] = address
        context["ti"].xcom_push(key=link.xcom_key, value=address)


def show_run(context: Any, file: Any, mlflow_run: str | None = None) -> str:
    """Have a task show where the training run that it belongs to is to be found.

    Args:
        file: `RunFile` of the run.
        mlflow_run: id of the task's own MLflow run; None: the one of the whole run.
    Returns:
        The address of the MLflow run.
    """
    address = sibling_run(file.mlflow_url, mlflow_run)
    show(context, (MLFLOW, address), (REPORT, report(file.dag_id, file.run_id)))
    return address


def run_page(dag_id: str, run_id: str) -> str:
    """Airflow's page of a DAG run."""
    return f"{_airflow()}/dags/{quote(dag_id, safe='')}/runs/{quote(run_id, safe='')}"


def card(dag_id: str, run_id: str) -> str:
    """The plugin's page of a DAG run; below it are `/report` and `/log/TASK`."""
    return f"{_airflow()}{PREFIX}/runs/{quote(dag_id, safe='')}/{quote(run_id, safe='')}"


def report(dag_id: str, run_id: str) -> str:
    """The report of a training run."""
    return f"{card(dag_id, run_id)}/report"


def job_log(dag_id: str, run_id: str, task_id: str) -> str:
    """The whole log of a task's engine job."""
    return f"{card(dag_id, run_id)}/log/{quote(task_id, safe='')}"


def sibling_run(mlflow_url: str, mlflow_run_id: str | None) -> str:
    """The page of another run of the same MLflow experiment; the given one's without an id."""
    return f"{mlflow_url.rpartition('/')[0]}/{mlflow_run_id}" if mlflow_url and mlflow_run_id else mlflow_url


def _airflow() -> str:
    """Airflow's address for a browser; empty (addresses are then relative to it) when `[api] base_url` is not set."""
    return conf.get("api", "base_url", fallback="").rstrip("/")
