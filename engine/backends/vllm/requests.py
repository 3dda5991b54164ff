"""What is asked of a generator and what it answers. Imports nothing heavy, so that every role can name the types."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ModelError


@dataclass(frozen=True)
class GeneratorConfig:
    """Sizes of one generator; the same on every rank."""

    max_model_len: int
    """Tokens of the longest prompt plus the longest response."""
    kv_cache_bytes: int = 256 << 20
    """KV cache of one rank."""
    max_concurrent_sequences: int = 64
    """Sequences one replica decodes at once."""
    seed: int = 0
    """Of vLLM's own generator; requests carry their own seeds, so no result depends on it."""


@dataclass(frozen=True)
class Request:
    """One response to sample."""

    prompt_ids: Sequence[int]
    seed: int
    """0 <= seed < 2**63. The response depends on it, the prompt and the weights, and on nothing else in the batch."""
    max_tokens: int
    temperature: float = 1.0
    """0 takes the likeliest token at every step."""


@dataclass(frozen=True)
class Response:
    """What was sampled."""

    token_ids: list[int]
    """The end token included, when one was sampled."""
    logprobs: list[float]
    """Of every token in `token_ids`, in nats, under the distribution it was sampled from (temperature applied)."""
    truncated: bool
    """Stopped by `max_tokens`, not by an end token."""


def read_stop_token_ids(model_dir: str | Path) -> list[int]:
    """The end tokens of a Hugging Face directory: generation_config.json's, else config.json's.

    Raises:
        ModelError: neither file names one.
    """
    for name in ("generation_config.json", "config.json"):
        path = Path(model_dir) / name
        ids = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        if ids is not None:
            return sorted(ids) if isinstance(ids, list) else [ids]
    raise ModelError(f"model {model_dir}: neither generation_config.json nor config.json has eos_token_id")
