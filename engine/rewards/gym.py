"""reasoning-gym: rows made by its generators, and its verifiers on what a row's metadata keeps of them."""

import hashlib
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from engine.errors import DataError
from engine.spec.prepare import GeneratedSource

METADATA_KEY = "reasoning_gym"


def generate(source: GeneratedSource) -> Iterator[dict[str, Any]]:
    """Entries (`question`, `answer`, `metadata`) of a source's generator, without end.

    Raises:
        DataError: no such task, or settings it does not accept.
    """
    dataset = _dataset(source.task, json.dumps({**source.config, "seed": _spread(source)}, sort_keys=True))
    index = 0
    while True:
        yield dataset[index]
        index += 1


def _spread(source: GeneratedSource) -> int:
    """A generator's seed far from those of other sources: row i of most tasks is drawn from seed + i alone, so that the
    rows of seeds 0 and 1 would be the same but one."""
    digest = hashlib.sha256(f"{source.task} {source.seed}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def keep_entry(source: GeneratedSource, entry: dict[str, Any]) -> dict[str, Any]:
    """What a row's metadata must hold for `verify`: plain JSON."""
    return {METADATA_KEY: {"task": source.task, "config": source.config, "entry": _to_json(entry)}}


def verify(answer: str, metadata: dict[str, Any]) -> float:
    """The task's own verifier.

    Args:
        answer: taken from the response.
        metadata: of the row, with the part made by `keep_entry`.
    Returns:
        A score, by reasoning-gym's convention in [0, 1].
    Raises:
        KeyError: the row was not made by reasoning-gym.
    """
    kept = metadata[METADATA_KEY]
    dataset = _dataset(kept["task"], json.dumps(kept["config"], sort_keys=True))
    return float(dataset.score_answer(answer, _from_json(kept["entry"])))


@cache
def _dataset(task: str, config: str):
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise DataError(f"task: reasoning-gym has no task {task!r}")
    try:
        return reasoning_gym.create_dataset(task, **json.loads(config))
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(f"config: reasoning-gym's {task} refuses {config}: {error}") from None


def _to_json(value: Any) -> Any:
    """JSON has neither tuples nor keys that are no strings; some verifiers compare with them."""
    if isinstance(value, tuple):
        return {"__tuple__": [_to_json(item) for item in value]}
    if isinstance(value, list):
        return [_to_json(item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: _to_json(item) for key, item in value.items()}
        return {"__items__": [[_to_json(key), _to_json(item)] for key, item in value.items()]}
    return value


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {"__tuple__"}:
            return tuple(_from_json(item) for item in value["__tuple__"])
        if value.keys() == {"__items__"}:
            return {_from_json(key): _from_json(item) for key, item in value["__items__"]}
        return {key: _from_json(item) for key, item in value.items()}
    return value
