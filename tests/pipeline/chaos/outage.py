"""A component of the stack that does not come back for a while."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

from tasks.stack import AIRFLOW_SETTINGS, answers
from tests.pipeline.airflow_stack import Airflow


def patience_s() -> tuple[float, float]:
    """Seconds that a task of the local stack lives without an API server: while it runs, and at its end."""
    def number(name: str) -> float:
        return float(AIRFLOW_SETTINGS[f"AIRFLOW__WORKERS__{name}"])

    # Airflow waits between 1 s and the longest, any time as likely, from the fourth try on.
    pause = (1 + number("EXECUTION_API_RETRY_WAIT_MAX")) / 2
    return (number("MIN_HEARTBEAT_INTERVAL") * number("MAX_FAILED_HEARTBEATS"),
            pause * (number("EXECUTION_API_RETRIES") - 4))


@contextlib.contextmanager
def away(airflow: Airflow, name: str, seconds: float) -> Iterator[None]:
    """Kill a component; for so long its place is held by one that answers nothing. Leaving waits until it answers."""
    component = next(c for c in airflow.stack._components if c.name == name)
    command, url = component.command, f"{airflow.stack.airflow_url}/api/v2/version"
    component.command = [sys.executable, "-c", f"import time; time.sleep({seconds})"]
    os.kill(airflow.stack.pid_of(name), signal.SIGKILL)
    try:
        airflow.wait(lambda: not answers(url))
        airflow.wait(lambda: "time.sleep" in str(component.process and component.process.args))
        yield
    finally:
        component.command = command
        airflow.wait(lambda: answers(url), seconds + 180)
