"""Random states of one rank: Python, numpy, torch, CUDA and Megatron's per-purpose generators, as tensors.

Only tensors and numbers, so that the file loads with `weights_only=True`.
"""

import random
from typing import Any

import numpy as np
import torch

from engine.backends.megatron.parallel import random_states, set_random_states


def rng_state() -> dict[str, Any]:
    """All random states of this process."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    state = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {"kind": kind, "keys": torch.from_numpy(keys.astype(np.int64)), "position": position,
                  "has_gauss": has_gauss, "cached": cached},
        "torch": torch.get_rng_state(),
        "megatron": random_states(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what `rng_state` returned."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["kind"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))
    torch.set_rng_state(state["torch"])
    set_random_states(state["megatron"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
