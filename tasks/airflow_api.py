"""The little of Airflow's REST API that a client of Ratchet needs: trigger, look, answer. Standard library only."""

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from engine.errors import FaultError

TIMEOUT_S = 30.0
PAUSES_S = (1.0, 2.0, 5.0, 10.0, 20.0)


class NoAnswer(FaultError):
    """The server did not answer at all."""


class AirflowAPI:
    """A logged-in client."""

    def __init__(self, url: str, user: str, password: str):
        """Args: url: of the API server, without a path."""
        self.url = url.rstrip("/")
        self._login = {"username": user, "password": password}
        self._token = ""

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """One request below `/api/v2`; the decoded answer. Logs in again when the token has expired.

        A question is asked again when the server is too busy to answer or is being restarted; an order is given once.

        Raises:
            FaultError: the server refused, or does not answer; with its reason.
        """
        for pause_s in PAUSES_S if method == "GET" else ():
            try:
                return self._call(method, path, body)
            except NoAnswer:
                time.sleep(pause_s)
        return self._call(method, path, body)

    def _call(self, method: str, path: str, body: Any) -> Any:
        if not self._token:
            self._token = self._send("POST", "/auth/token", self._login)["access_token"]
        try:
            return self._send(method, f"/api/v2{path}", body)
        except PermissionError:
            self._token = self._send("POST", "/auth/token", self._login)["access_token"]
            return self._send(method, f"/api/v2{path}", body)

    def trigger(self, dag_id: str, conf: dict[str, Any], run_id: str | None = None) -> str:
        """Start a DAG run; its run id."""
        body = {"logical_date": None, "conf": conf} | ({"dag_run_id": run_id} if run_id else {})
        return self.call("POST", f"/dags/{dag_id}/dagRuns", body)["dag_run_id"]

    def run(self, dag_id: str, run_id: str) -> dict[str, Any]:
        """A DAG run."""
        return self.call("GET", f"/dags/{dag_id}/dagRuns/{_quoted(run_id)}")

    def runs(self, dag_id: str) -> list[dict[str, Any]]:
        """The last DAG runs, newest first."""
        return self.call("GET", f"/dags/{dag_id}/dagRuns?order_by=-id&limit=20")["dag_runs"]

    def tasks(self, dag_id: str, run_id: str) -> dict[str, dict[str, Any]]:
        """Task instances of a run by task id."""
        answer = self.call("GET", f"/dags/{dag_id}/dagRuns/{_quoted(run_id)}/taskInstances?limit=200")
        return {ti["task_id"]: ti for ti in answer["task_instances"]}

    def set_state(self, dag_id: str, run_id: str, task_id: str, state: str) -> None:
        """Mark a task, as a person would in the UI."""
        self.call("PATCH", f"/dags/{dag_id}/dagRuns/{_quoted(run_id)}/taskInstances/{task_id}", {"new_state": state})

    def clear(self, dag_id: str, run_id: str, task_ids: list[str], *, downstream: bool = False) -> None:
        """Clear tasks of a run, so that they run again."""
        self.call("POST", f"/dags/{dag_id}/clearTaskInstances", {
            "dag_run_id": run_id, "task_ids": task_ids, "dry_run": False, "only_failed": False, "reset_dag_runs": True,
            "include_downstream": downstream})

    def xcom(self, dag_id: str, run_id: str, task_id: str, key: str = "return_value") -> Any:
        """What a task returned; None when it returned nothing."""
        try:
            path = f"/dags/{dag_id}/dagRuns/{_quoted(run_id)}/taskInstances/{task_id}/xcomEntries/{key}"
            return self.call("GET", f"{path}?deserialize=false&stringify=false")["value"]
        except FaultError as error:
            if "404" in str(error):
                return None
            raise

    def log(self, dag_id: str, run_id: str, task_id: str, attempt: int = 1) -> str:
        """The log of one try of a task, as text."""
        answer = self.call("GET", f"/dags/{dag_id}/dagRuns/{_quoted(run_id)}/taskInstances/{task_id}/logs/{attempt}")
        return "\n".join(_line(line) for line in answer["content"])

    def answer(self, dag_id: str, run_id: str, task_id: str, option: str) -> None:
        """Answer an approval."""
        self.call("PATCH", f"/dags/{dag_id}/dagRuns/{_quoted(run_id)}/taskInstances/{task_id}/-1/hitlDetails",
                  {"chosen_options": [option], "params_input": {}})

    def _send(self, method: str, path: str, body: Any) -> Any:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._token and not path.startswith("/auth"):
            headers["Authorization"] = f"Bearer {self._token}"
        request = urllib.request.Request(  # noqa: S310 - the URL is the deployment's own http address
            self.url + path, method=method, headers=headers, data=None if body is None else json.dumps(body).encode())
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
                text = answer.read()
        except urllib.error.HTTPError as error:
            if error.code == 401 and not path.startswith("/auth"):
                raise PermissionError from None
            reason = error.read().decode(errors="replace")[:500]
            raise FaultError(f"Airflow {method} {path}: {error.code} {reason}") from None
        except (OSError, ValueError) as error:
            raise NoAnswer(f"Airflow {method} {path}: {error}") from None
        return json.loads(text) if text else None


def _line(line: Any) -> str:
    """A line of a task log, an exception with its type and words."""
    if isinstance(line, str):
        return line
    raised = [f"{e.get('exc_type')}: {e.get('exc_value')}" for e in line.get("error_detail") or []]
    return " ".join([str(line.get("event", "")), *raised])


def _quoted(part: str) -> str:
    return urllib.parse.quote(part, safe="")
