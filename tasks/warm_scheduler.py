"""Airflow's scheduler for the local stack, with what its tasks import already loaded.

The LocalExecutor forks a process per task, so what is loaded here a task does not load again: MLflow's client alone
takes seconds. Waits for the API server before it starts, because a scheduler without one burns the retries of its
tasks. `python -m tasks.warm_scheduler API_URL`.
"""

import sys
import time
import urllib.request


def main(api_url: str) -> None:
    """Load, wait, schedule."""
    import mlflow.tracking  # noqa: F401 - loaded for the tasks
    from airflow.__main__ import main as airflow

    import tasks.training  # noqa: F401 - loaded for the tasks

    while not _answers(f"{api_url}/api/v2/version"):
        time.sleep(0.2)
    sys.argv = ["airflow", "scheduler", "--skip-serve-logs"]
    airflow()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=3):  # noqa: S310 - our own http address
            return True
    except (OSError, ValueError):
        return False


if __name__ == "__main__":
    main(sys.argv[1])
