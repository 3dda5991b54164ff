"""Where this deployment keeps things and runs jobs: what DAGs and tasks know of the RATCHET_ environment variables.

They say where and when, never how a model is trained: that is in the preset and the form.
"""

import math
import os
from pathlib import Path
from urllib.parse import urlsplit

from engine.errors import SpecError


def home() -> Path:
    """RATCHET_HOME: job directories and slots, on a disk that every worker sees."""
    return Path(os.environ.get("RATCHET_HOME", ".ratchet")).absolute()


def store() -> str:
    """RATCHET_STORE: prompts, checkpoints, exports and evaluations; a path or `s3://`."""
    uri = os.environ.get("RATCHET_STORE") or str(home() / "store")
    return uri.rstrip("/") if "://" in uri else os.path.abspath(uri)


def presets() -> Path:
    """RATCHET_PRESETS: the folder of preset files; `examples/` of the project by default."""
    return Path(os.environ.get("RATCHET_PRESETS") or Path(__file__).resolve().parents[1] / "examples")


def prompts() -> str | None:
    """RATCHET_PROMPTS: prefix that `land_prompts` watches, a path or `s3://`; None: it watches nothing."""
    uri = os.environ.get("RATCHET_PROMPTS")
    if not uri:
        return None
    return uri.rstrip("/") if "://" in uri else os.path.abspath(uri)


def landing_cron() -> str | None:
    """RATCHET_LANDING_CRON: when `land_prompts` looks, cron in UTC; None when there is nothing to look at."""
    return (os.environ.get("RATCHET_LANDING_CRON") or "*/5 * * * *") if prompts() else None


def retrain_preset() -> str | None:
    """RATCHET_RETRAIN_PRESET: the preset that `retrain` trains; None: it starts nothing by itself."""
    return os.environ.get("RATCHET_RETRAIN_PRESET") or None


def retrain_cron() -> str | None:
    """RATCHET_RETRAIN_CRON: when `retrain` looks besides whenever prompts land, cron in UTC; None: only then."""
    return os.environ.get("RATCHET_RETRAIN_CRON") or None


def launcher() -> str:
    """RATCHET_LAUNCHER: name of the launcher."""
    return os.environ.get("RATCHET_LAUNCHER") or "local"


def mlflow_url() -> str:
    """RATCHET_MLFLOW_URL: MLflow's address for a browser; MLFLOW_TRACKING_URI without user and password by default."""
    return public_address(os.environ.get("RATCHET_MLFLOW_URL") or os.environ.get("MLFLOW_TRACKING_URI", ""))


def public_address(url: str) -> str:
    """An address without user and password, and without a slash at its end."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")


def gpu_hour_price() -> float | None:
    """RATCHET_GPU_HOUR_PRICE: what a GPU costs here in an hour, in your currency; None when it is not set."""
    text = os.environ.get("RATCHET_GPU_HOUR_PRICE")
    if not text:
        return None
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not 0 <= price < math.inf:
        raise SpecError(f"RATCHET_GPU_HOUR_PRICE={text!r} is not a price; give a number, for example 2.5")
    return price


def gpus() -> int:
    """RATCHET_GPUS: GPUs of a worker; 0 when it has none."""
    return _count("RATCHET_GPUS", 0)


def pool_slots() -> int:
    """RATCHET_POOL_SLOTS: slots of the pool `gpus` that one job takes; the GPUs of its layout."""
    return _count("RATCHET_POOL_SLOTS", 1)


def max_stages() -> int:
    """RATCHET_MAX_STAGES: stages that the DAG is unrolled to."""
    return _count("RATCHET_MAX_STAGES", 4)


def housekeeping_deletes() -> bool:
    """RATCHET_HOUSEKEEPING: `delete` makes the weekly housekeeping delete; `report`, the default, only lists.

    Raises:
        SpecError: another word.
    """
    word = os.environ.get("RATCHET_HOUSEKEEPING") or "report"
    if word not in ("report", "delete"):
        raise SpecError(f"RATCHET_HOUSEKEEPING={word!r} is neither `report` nor `delete`")
    return word == "delete"


def engine_python() -> str:
    """RATCHET_ENGINE_PYTHON: the interpreter of the engine's environment.

    Raises:
        SpecError: not set, or not a program.
    """
    path = os.environ.get("RATCHET_ENGINE_PYTHON", "")
    if not os.access(path, os.X_OK):
        raise SpecError(f"RATCHET_ENGINE_PYTHON={path!r} is not an interpreter; set it to the Python of the engine "
                        "environment, for example .venv/engine/bin/python")
    return path


def engine_environment() -> set[str]:
    """RATCHET_ENGINE_ENV: names of variables, with commas between, that engines get besides those they always get."""
    return {name.strip() for name in os.environ.get("RATCHET_ENGINE_ENV", "").split(",")}


def _count(name: str, default: int) -> int:
    text = os.environ.get(name) or str(default)
    if not text.isdigit():
        raise SpecError(f"{name}={text!r} is not a number; give the count, for example {name}={default}")
    return int(text)
