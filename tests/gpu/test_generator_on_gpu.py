"""What only a GPU can show: sleeping frees the device, and CUDA graphs stay valid when weights are written in place."""

import pytest
import torch

from engine.backends.vllm.requests import Request
from tests.engine.tiny_models import copy_with_new_weights, make_tiny_model
from tests.engine.vllm_process import generator, in_vllm

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
REQUESTS = [Request([3 + i, 9, 12 + i] * 10, seed=i, max_tokens=10, temperature=0.0) for i in range(6)]


def test_sleep_frees_the_device_and_graphs_serve_weights_written_in_place(tmp_path):
    model = make_tiny_model(tmp_path / "one", num_hidden_layers=4)
    other = copy_with_new_weights(model, tmp_path / "two", seed=1)
    freed, first, second, again, fresh = in_vllm(_sleep_and_replace, model, other, timeout_s=600)
    assert freed >= 16 << 20
    assert first == again
    assert second == fresh != first


def _sleep_and_replace(model, other):
    engine = generator(model)
    first = [r.token_ids for r in engine.generate(REQUESTS)]
    before = torch.cuda.mem_get_info()[0]
    engine.sleep()
    freed = torch.cuda.mem_get_info()[0] - before
    engine.wake("weights")
    engine.load(other)
    engine.wake("kv_cache")
    second = [r.token_ids for r in engine.generate(REQUESTS)]
    fresh = [r.token_ids for r in generator(other, 15).generate(REQUESTS)]
    engine.load(model)
    return freed, first, second, [r.token_ids for r in engine.generate(REQUESTS)], fresh
