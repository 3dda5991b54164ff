"""Small sections of a pipeline that are right, for tests to break."""

from typing import Any


def train_section(**changes: Any) -> dict[str, Any]:
    """A `train` section: PPO, one rank."""
    return {"algorithm": {"kind": "ppo"}, "rewards": [{"kind": "exact"}], "rollout": {"max_response_tokens": 8},
            "actor": {"lr": 1e-3}, "critic": {"lr": 1e-3}, "iterations": 3, "prompts_per_iteration": 8, **changes}


def preset(**changes: Any) -> dict[str, Any]:
    """A whole preset."""
    source = {"kind": "reasoning_gym", "task": "chain_sum", "size": 8}
    return {
        "model": "models/tiny", "registry": {"model": "tiny"}, "train": train_section(), "stages": {"count": 2},
        "prepare": {"max_prompt_tokens": 32, "train": {"sources": [source]},
                    "eval": {"sources": [{**source, "seed": 1}]}},
        "evaluate": {"rewards": [{"kind": "exact"}], "max_response_tokens": 8}, **changes}
