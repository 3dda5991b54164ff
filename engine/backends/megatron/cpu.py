"""Megatron-core 0.16.1 without CUDA: stand-ins for the device calls it makes unconditionally. Does nothing on CUDA.

The only place of its kind. It changes `torch.cuda` (unusable here anyway) and names inside Megatron's own modules,
never torch's global factories: other libraries in the process use those (transformers' rotary tables, vLLM).
"""

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch

SUPPORTED_VERSION = "0.16.1"
CPU = torch.device("cpu")

# Modules that pass device="cuda" to a factory; they see a `torch` whose factories answer with CPU tensors.
MODULES_WITH_CUDA_LITERALS = (
    "optimizer.optimizer",
    "optimizer.clip_grads",
    "optimizer.grad_scaler",
    "pipeline_parallel.schedules",
    "transformer.utils",
    "tensor_parallel.data",
    "utils",
    "dist_checkpointing.mapping",
    "dist_checkpointing.exchange_utils",
    "dist_checkpointing.strategies.state_dict_saver",
)
FACTORIES = ("empty", "zeros", "ones", "tensor", "empty_like")


class _Ordered:
    """A stream or event where nothing runs asynchronously: waiting and recording are done already."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error: Any):
        return False

    def _done(self, *args: Any, **kwargs: Any) -> None:
        return None

    synchronize = wait_stream = wait_event = record = wait = _done

    def record_event(self, *args: Any):
        return self

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class _TorchOnCPU:
    """`torch` for one module: its own factories, everything else passed through."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def install() -> None:
    """Make `import megatron.core` work in this process. Idempotent; call before the first such import.

    Raises:
        ImportError: another version of megatron-core, whose internals this file was not checked against.
    """
    if torch.cuda.is_available() or getattr(torch.cuda, "ratchet_stand_in", False):
        return
    if version("megatron-core") != SUPPORTED_VERSION:
        raise ImportError(
            f"megatron-core {version('megatron-core')} on CPU: engine/backends/megatron/cpu.py knows "
            f"{SUPPORTED_VERSION}; install that version or check the file against the new one")
    torch.cuda.ratchet_stand_in = True  # type: ignore[attr-defined]
    _replace_device_calls()
    _accept_cpu_tensor_types()
    random = _import_without_compiling()
    _keep_rng_on_cpu(random)
    _replace_cuda_literals()


def _replace_device_calls() -> None:
    cuda = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.Stream = type("Stream", (_Ordered,), {})
    cuda.Event = type("Event", (_Ordered,), {})
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.is_current_stream_capturing = lambda: False
    # Each name gets a function of its own: torch._dynamo, which transformers imports, refuses two names of one object.
    for name in ("current_stream", "default_stream"):
        setattr(cuda, name, lambda *args, **kwargs: cuda.Stream())
    for name in ("synchronize", "empty_cache", "set_device"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    for name in ("range_push", "range_pop"):
        setattr(cuda.nvtx, name, lambda *args, **kwargs: None)
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self


def _accept_cpu_tensor_types() -> None:
    """Megatron's optimizer compares `param.type()` with 'torch.cuda.FloatTensor'; answer it, and only it, that way."""
    original = torch.Tensor.type

    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any):
        result = original(self, *args, **kwargs)
        if not args and not kwargs:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.startswith("megatron.core.optimizer"):
                return result.replace("torch.", "torch.cuda.", 1)
        return result

    torch.Tensor.type = tensor_type


def _import_without_compiling() -> Any:
    """Import Megatron with its jit_fuser (torch.compile) bound to the identity: no compiler is needed at run time."""
    compiler = torch.compile
    torch.compile = lambda function=None, **kwargs: function if function is not None else (lambda f: f)
    try:
        importlib.import_module("megatron.core.jit")
        return importlib.import_module("megatron.core.tensor_parallel.random")
    finally:
        torch.compile = compiler


def _keep_rng_on_cpu(random: Any) -> None:
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)

    @contextlib.contextmanager
    def fork(self: Any, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME):
        outer = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outer)

    random.CudaRNGStatesTracker.fork = fork


def _replace_cuda_literals() -> None:
    stand_in = _TorchOnCPU()
    for name in FACTORIES:
        setattr(stand_in, name, _on_cpu(getattr(torch, name)))
    for name in MODULES_WITH_CUDA_LITERALS:
        importlib.import_module(f"megatron.core.{name}").torch = stand_in  # type: ignore[attr-defined]


def _on_cpu(factory: Callable) -> Callable:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any):
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return create
