"""Airflow's scheduler for the local stack, with what its tasks import already loaded.

The LocalExecutor forks a process per task, so what is loaded here a task does not load again: MLflow's client alone
takes seconds. Waits for the API server before it starts, because a scheduler without one burns the retries of its
tasks. Takes over at once from the scheduler before it, which the stack has ended with all its tasks: Airflow by itself
waits half a minute for a dead scheduler to come back, and looks again after five. `python -m tasks.warm_scheduler
API_URL`.
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
    take_over()
    sys.argv = ["airflow", "scheduler", "--skip-serve-logs"]
    airflow()


def take_over() -> None:
    """Record that no other scheduler of this stack runs: the next one gives out its tasks again when it starts."""
    from airflow.jobs.job import Job, JobState
    from airflow.utils.session import create_session
    from sqlalchemy import update

    with create_session() as session:
        session.execute(update(Job).where(Job.job_type == "SchedulerJob", Job.state == JobState.RUNNING)
                        .values(state=JobState.FAILED))


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=3):  # noqa: S310 - our own http address
            return True
    except (OSError, ValueError):
        return False


if __name__ == "__main__":
    main(sys.argv[1])
