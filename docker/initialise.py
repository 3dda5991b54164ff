"""Prepares a deployment before its services start: Airflow's tables, password file and pool, the store's buckets.

Safe to run again. Reads AIRFLOW_ADMIN_PASSWORD, RATCHET_GPUS, and the buckets' names as arguments.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import boto3
from botocore.exceptions import ClientError


def airflow(*arguments: str) -> None:
    """Run one Airflow command; its failure ends this program."""
    subprocess.run([sys.executable, "-m", "airflow", *arguments], check=True)


def write_password_file(path: Path, password: str) -> None:
    """The one user of Airflow's simple auth manager, readable by this user alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump({"admin": password}, file)


def make_bucket(name: str) -> None:
    """Create a bucket unless it is there; the address and the keys come from the AWS_ variables."""
    client = boto3.client("s3")
    try:
        client.create_bucket(Bucket=name)
    except ClientError as error:
        if error.response["Error"]["Code"] not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
            raise


def main(buckets: list[str]) -> None:
    """Do all of it; stop at the first thing that fails."""
    write_password_file(Path(os.environ["AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE"]),
                        os.environ["AIRFLOW_ADMIN_PASSWORD"])
    for name in buckets:
        make_bucket(name)
    airflow("db", "migrate")
    airflow("pools", "set", "gpus", os.environ.get("RATCHET_GPUS") or "1", "GPUs of the workers")


if __name__ == "__main__":
    main(sys.argv[1:])
