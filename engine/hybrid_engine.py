"""One model, two layouts on the same ranks: switching between training it with Megatron and serving it with vLLM."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from engine.backends.vllm.requests import Request, Response
from engine.errors import ReshardError

if TYPE_CHECKING:
    from engine.backends.vllm.generator import Generator
    from engine.resharding.execute import SyncReport, WeightSync

Mode = Literal["generate", "train"]


@dataclass(frozen=True)
class Transition:
    """What a switch of mode did on this rank."""

    mode: Mode
    policy_version: int
    moved: bool
    """False: these weights were served already."""
    bytes_received: int
    bytes_sent: int
    seconds: float


class HybridEngine:
    """Keeps one rank's trained and served weights in step.

    Going back to training keeps the served weights and the KV cache where they are, so that switching to and fro
    costs nothing; `release` gives their memory back when training needs it. After a failed transfer nothing is
    generated until a whole one succeeded.
    """

    def __init__(self, generator: "Generator", sync: "WeightSync", policy_version: Callable[[], int]):
        """Args: policy_version: of the trained weights; it rises with every update."""
        self._generator, self._sync, self._policy_version = generator, sync, policy_version
        self.mode: Mode = "train"
        self.last_transition: Transition | None = None
        self._served_version: int | None = None
        self._fingerprint = 0

    def switch_mode(self, mode: Mode) -> Transition:
        """Go to `mode`; every rank must. The weights move only when the policy version is new or they were released.

        Raises:
            ReshardError: the transfer failed, or the served weights are not those that were transferred.
        """
        started = time.monotonic()
        report = self._serve() if mode == "generate" else None
        self.mode = mode
        self.last_transition = Transition(
            mode=mode, policy_version=self._policy_version(), moved=report is not None,
            bytes_received=report.bytes_received if report else 0, bytes_sent=report.bytes_sent if report else 0,
            seconds=time.monotonic() - started)
        return self.last_transition

    def generate(self, requests: Sequence[Request]) -> list[Response]:
        """Sample with the trained weights.

        Raises:
            ReshardError: not in mode `generate`, or the trained weights are newer than the served ones.
        """
        if self.mode != "generate":
            raise ReshardError(f"rollout in mode {self.mode!r}: call switch_mode('generate') first")
        self._sync.require(self._policy_version())
        return self._generator.generate(requests)

    def release(self) -> None:
        """Give back the memory of generation: on GPU weights and KV cache, on CPU the KV cache.

        Raises:
            ReshardError: in mode `generate`.
        """
        if self.mode == "generate":
            raise ReshardError("memory of generation asked for in mode 'generate'; call switch_mode('train') first")
        self._generator.sleep()
        if "weights" in self._generator.asleep:
            self._served_version = None
            self._sync.invalidate()

    def _serve(self) -> "SyncReport | None":
        version = self._policy_version()
        # Weights before KV cache: during the transfer there is room for both layouts of the weights only.
        self._generator.wake("weights")
        if version == self._served_version:
            self._check_unchanged(version)
            report = None
        else:
            self._served_version = None
            self.mode = "train"
            report = self._sync.run(version)
            self._generator.weights_changed()
            self._fingerprint = self._generator.fingerprint()
            self._served_version = version
        self._generator.wake("kv_cache")
        return report

    def _check_unchanged(self, version: int) -> None:
        fingerprint = self._generator.fingerprint()
        if fingerprint != self._fingerprint:
            self._served_version = None
            self._sync.invalidate()
            raise ReshardError(
                f"served weights have hash {fingerprint:016x}, version {version} was transferred with "
                f"{self._fingerprint:016x}: something wrote over them; the next switch transfers them again")
