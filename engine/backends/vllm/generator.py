"""A vLLM engine inside this process: built once, its weights replaced in place, its memory given back on request.

Every rank of the job builds its own, all at the same time; consecutive groups of tp ranks form a replica and must be
given the same requests in the same order. torch.distributed's default group must exist.
"""

import json
import logging
import os
import secrets
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.backends.vllm.requests import GeneratorConfig, Request, Response, read_stop_token_ids
from engine.errors import ModelError, ReshardError, SpecError
from engine.layout import GenerationLayout

# Read while vLLM is imported. Multiprocessing off: the engine core must live in the rank that trains.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm import LLM, ModelRegistry, SamplingParams
    from vllm import _custom_ops as vllm_ops

ON_GPU = torch.cuda.is_available()
CPU_BATCH_TOKENS = 4096
"""Tokens of one step on CPU, if no single sequence is longer."""
CPU_BLOCK_TOKENS = 32
"""Tokens of a KV block on CPU. vLLM's 128 there would give a short sequence a mostly empty block of its own."""


class Generator:
    """Samples responses with the weights that lie in `params()`."""

    def __init__(self, model_dir: str | Path, layout: GenerationLayout, config: GeneratorConfig):
        """Build the engine with placeholder weights: fill `params()` or call `load` before generating.

        Args:
            model_dir: Hugging Face directory; its config is read, its weights are not.
        Raises:
            LayoutError: the ranks do not fill whole replicas.
            SpecError: vLLM refuses the sizes, for example a KV cache that does not hold one sequence.
        """
        layout.replicas(dist.get_world_size())
        self.config = config
        self.stop_token_ids = read_stop_token_ids(model_dir)
        with _untouched_process_state():
            self.llm = _build(Path(model_dir), layout, config)
        self._runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self._asleep: set[str] = set()
        self._kv_bytes = 0 if ON_GPU else self._kv_storage().nbytes()

    def params(self) -> dict[str, Tensor]:
        """The live parameters of this rank by vLLM's names. Write them in place only, then call `weights_changed`."""
        return dict(self._runner.model.named_parameters())

    def weights_changed(self) -> None:
        """Forget the KV blocks of earlier prompts: they were computed with other weights.

        Raises:
            RuntimeError: requests are still running.
        """
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache: requests are running while weights change")

    def fingerprint(self) -> int:
        """A hash of all parameters' bytes, to tell whether anything wrote over them since it was last taken."""
        hashes = torch.stack([torch.hash_tensor(p.detach()).view(torch.int64) for p in self.params().values()])
        # Each tensor's hash is an XOR; odd factors keep equal changes in two tensors from cancelling.
        factors = torch.arange(1, 2 * len(hashes), 2, device=hashes.device)
        return int((hashes * factors).sum()) % (1 << 64)

    def load(self, model_dir: str | Path) -> None:
        """Replace the weights by those of a Hugging Face directory of the same architecture.

        Raises:
            ModelError: a file is missing or truncated, or parameters are missing from it.
        """
        self.stop_token_ids = read_stop_token_ids(model_dir)
        with torch.no_grad():
            try:
                loaded = self._runner.model.load_weights(read_weights(model_dir))
            except (AssertionError, KeyError, ValueError) as error:
                raise ModelError(f"model {model_dir}: vLLM cannot load its weights ({error!r})") from error
        if missing := sorted(set(self.params()) - loaded):
            raise ModelError(f"model {model_dir}: {len(missing)} parameters are not in its files, first {missing[0]}")
        self.weights_changed()

    def generate(self, requests: Sequence[Request]) -> list[Response]:
        """Sample one response per request, in their order.

        Raises:
            ValueError: a prompt and its response do not fit into `max_model_len` tokens, or a prompt is empty.
            ReshardError: the engine sleeps.
        """
        if self._asleep:
            raise ReshardError(f"the generator sleeps ({', '.join(sorted(self._asleep))}): wake it before generating")
        limit = self.config.max_model_len
        for index, request in enumerate(requests):
            if not request.prompt_ids or len(request.prompt_ids) + request.max_tokens > limit:
                raise ValueError(f"request {index}: {len(request.prompt_ids)} prompt tokens + {request.max_tokens} "
                                 f"response tokens; need at least 1 and at most {limit} together")
        params = [self.sampling_params(request) for request in requests]
        prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]
        # vLLM draws from torch's global generator at every step, also when all requests have seeds.
        with _kept_rng(), _no_jit():
            outputs = self.llm.generate(prompts, params, use_tqdm=False)
        completions = [output.outputs[0] for output in outputs]
        return [Response(list(c.token_ids), c.logprobs.logprobs, c.finish_reason == "length") for c in completions]

    def sampling_params(self, request: Request) -> SamplingParams:
        """What vLLM is told about one request."""
        return SamplingParams(
            temperature=request.temperature, seed=request.seed, max_tokens=request.max_tokens, logprobs=0,
            flat_logprobs=True, detokenize=False, ignore_eos=True, stop_token_ids=self.stop_token_ids)

    def sleep(self) -> None:
        """Give back memory: on GPU weights and KV cache (both are lost), on CPU the KV cache."""
        if self._asleep:
            return
        self.weights_changed()
        if ON_GPU:
            self.llm.sleep(level=2)
            self._asleep = {"weights", "kv_cache"}
        else:
            self._kv_storage().resize_(0)
            self._asleep = {"kv_cache"}

    def wake(self, tag: str) -> None:
        """Take memory back: `weights` (their content must then be transferred) or `kv_cache`."""
        if tag not in self._asleep:
            return
        if ON_GPU:
            self.llm.wake_up([tag])
        else:
            storage = self._kv_storage()
            storage.resize_(self._kv_bytes)
            # Attention multiplies masked slots by zero: NaNs in recycled memory would survive that.
            torch.empty(0, dtype=torch.uint8).set_(storage).zero_()
        self._asleep.discard(tag)

    @property
    def asleep(self) -> frozenset[str]:
        """Tags of the memory that is given back: `weights`, `kv_cache`."""
        return frozenset(self._asleep)

    def _kv_storage(self) -> torch.UntypedStorage:
        # All layers are views of one allocation (vllm.v1.worker.utils.allocate_kv_cache).
        return self._runner.kv_caches[0].untyped_storage()


def read_weights(model_dir: str | Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a Hugging Face directory, one at a time.

    Raises:
        ModelError: no safetensors file, or one that is truncated.
    """
    files = sorted(Path(model_dir).glob("*.safetensors"))
    if not files:
        raise ModelError(f"model {model_dir}: no *.safetensors file")
    for file in files:
        try:
            tensors = safe_open(file, framework="pt")
            yield from ((name, tensors.get_tensor(name)) for name in tensors.keys())
        except SafetensorError as error:
            raise ModelError(f"model file {file}: {error}; copy it again") from None


def _build(model_dir: Path, layout: GenerationLayout, config: GeneratorConfig) -> LLM:
    # The external launcher reads these; a single process has no torchrun to set them.
    os.environ.setdefault("RANK", str(dist.get_rank()))
    os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
    # Otherwise CPU linear layers pack their weights away and a new weight cannot be written in place.
    vllm_ops._supports_onednn = False
    _name_shared_memory_for_this_job()
    for architecture in json.loads((model_dir / "config.json").read_text()).get("architectures", []):
        # vLLM inspects an unknown class in a new process (16 s); registering the class itself needs none.
        if architecture in ModelRegistry.models:
            ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())
    # Whole prefills on CPU: for a part of one, vLLM 0.32 rewinds the request's generator, which CPU generators cannot.
    device = {"enable_sleep_mode": True} if ON_GPU else {
        "enforce_eager": True, "block_size": CPU_BLOCK_TOKENS, "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(CPU_BATCH_TOKENS, config.max_model_len)}
    try:
        return LLM(
            str(model_dir), tensor_parallel_size=layout.tp, distributed_executor_backend="external_launcher",
            dtype="bfloat16" if ON_GPU else "float32", load_format="dummy", skip_tokenizer_init=True,
            generation_config="vllm", logprobs_mode="processed_logprobs", max_model_len=config.max_model_len,
            max_num_seqs=config.max_concurrent_sequences, kv_cache_memory_bytes=config.kv_cache_bytes,
            # Only checked against free memory, of which the trainer has taken its part already.
            gpu_memory_utilization=0.01, seed=config.seed, **device)
    except ValueError as error:
        raise SpecError(f"rollout: vLLM refuses model {model_dir} with {config}: {error}") from error


def _name_shared_memory_for_this_job() -> None:
    """On CPU, tp ranks meet in /dev/shm under a name that vLLM makes of their ranks alone.

    A second job on the machine, or the remains of a killed one, would then have it already ("errno: 17").
    """
    if ON_GPU:
        return
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    token = [secrets.token_hex(8)]
    dist.broadcast_object_list(token)
    vllm_name = getattr(_CPUSHMDistributed.make_group_name, "vllm_name", _CPUSHMDistributed.make_group_name)

    def job_name(communicator: Any) -> str:
        # vLLM's name starts with slashes, which are only allowed in front.
        return f"ratchet-{token[0]}{vllm_name(communicator).replace('/', '')}"

    job_name.vllm_name = vllm_name  # type: ignore[attr-defined]
    _CPUSHMDistributed.make_group_name = staticmethod(job_name)


@contextmanager
def _untouched_process_state() -> Iterator[None]:
    """Building an engine seeds the global generators and, on CPU, replaces torch.set_num_threads: put both back."""
    threads, set_num_threads = torch.get_num_threads(), torch.set_num_threads
    with _kept_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch.set_num_threads = set_num_threads
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)


@contextmanager
def _kept_rng() -> Iterator[None]:
    import random

    import numpy as np

    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if ON_GPU else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _no_jit():
    # vLLM decorates two lines of its sampler with torch.compile: half a minute of C++ compiler on CPU, or an error
    # where there is none. On GPU they are part of the warm-up.
    return nullcontext() if ON_GPU else torch.compiler.set_stance("force_eager")
