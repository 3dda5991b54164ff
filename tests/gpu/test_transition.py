"""Megatron to vLLM on all CUDA devices of a machine, with NCCL and bf16. `make test-gpu` runs it.

Ready to run, and not run yet: no machine of this project has had a GPU. Everything it calls also runs on CPU, in
tests/engine/test_hybrid_engine.py, except vLLM's sleep and wake-up and NCCL itself.
"""

import pytest
import torch

from engine.layout import GenerationLayout, ParallelLayout
from tests.engine.multiprocess import run_ranks
from tests.engine.tiny_models import make_tiny_model

DEVICES = torch.cuda.device_count()
BF16_GAP = 0.05
"""Nats of a token: bf16 keeps 8 bits, and the two libraries sum in another order."""

pytestmark = [pytest.mark.gpu, pytest.mark.slow,
              pytest.mark.skipif(not DEVICES, reason="needs a CUDA device, and this machine has none")]


def layouts() -> list[ParallelLayout]:
    """Every tp x pp x dp of two that the machine has devices for."""
    if DEVICES < 2:
        return [ParallelLayout()]
    degrees = [ParallelLayout(dp=DEVICES), ParallelLayout(tp=2, dp=DEVICES // 2), ParallelLayout(pp=2, dp=DEVICES // 2)]
    return [layout for layout in degrees if layout.world_size == DEVICES]


@pytest.mark.parametrize("tp", [1, 2])
def test_the_served_policy_is_the_trained_one_through_sleep_and_wake_up(tp, tmp_path):
    if DEVICES % tp:
        pytest.skip(f"tp={tp} does not divide {DEVICES} devices")
    model = make_tiny_model(tmp_path / "tiny", "llama", tie_word_embeddings=True)
    for layout in layouts():
        for gaps, moved, asleep in run_ranks(two_updates, DEVICES, model, layout, tp, timeout_s=900):
            assert max(gaps) < BF16_GAP, str(layout)
            assert moved == [True, False, True], str(layout)
            assert asleep == {"weights", "kv_cache"}


def two_updates(directory, layout, tp):
    """Gaps after two transfers, whether each of three switches moved weights, and what slept after a release."""
    from tests.engine.test_hybrid_engine import REQUESTS, Policy, _tensor_parallel_generator, batch_of

    generation = GenerationLayout(tp)
    p = Policy(directory, layout, _tensor_parallel_generator(directory, generation), generation)
    gaps, moved, asleep = [], [], frozenset()
    for step in range(3):
        if step != 1:
            p.update()
        moved.append(p.engine.switch_mode("generate").moved)
        responses = p.engine.generate(REQUESTS)
        p.engine.switch_mode("train")
        if step != 0:
            p.engine.release()
            asleep = frozenset(p.served.asleep)
        gaps.append(p.logprob_gap(batch_of(responses).to(p.world.device)))
    return gaps, moved, asleep
