"""One process for all tests that need vLLM: it takes tens of seconds to start, and it changes the process it lives in.

    in_vllm(check, *args)     # runs a module-level function there and returns what it returns, or raises its traceback

`generator(...)` is for use inside `check`: engines are built once per model and configuration.
"""

import atexit
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engine.multiprocess import Ranks

_process: list[Ranks] = []
_generators: dict[Any, Any] = {}


def in_vllm(function: Callable, *args: Any, timeout_s: float = 300.0) -> Any:
    """Run `function(*args)` in the process that has vLLM."""
    if not _process:
        _process.append(Ranks(1))
        atexit.register(_process[0].stop)
    return _process[0].run(function, *args, timeout_s=timeout_s)[0]


def generator(model_dir: Path, max_concurrent_sequences: int = 16) -> Any:
    """A generator with the weights of `model_dir` (inside the vLLM process only)."""
    from engine.backends.vllm.generator import Generator
    from engine.backends.vllm.requests import GeneratorConfig
    from engine.layout import GenerationLayout
    from engine.ranks import join_ranks

    key = (str(model_dir), max_concurrent_sequences)
    if key not in _generators:
        join_ranks()
        _generators[key] = Generator(model_dir, GenerationLayout(), GeneratorConfig(
            max_model_len=96, kv_cache_bytes=16 << 20, max_concurrent_sequences=max_concurrent_sequences))
    _generators[key].load(model_dir)
    return _generators[key]
