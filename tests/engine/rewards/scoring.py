"""Shortcuts for tests of rewards."""

from typing import Any

from engine.prompts import Prompt
from engine.rewards.functions import reward_function
from engine.rewards.outcome import Case, Verdict
from engine.rewards.pool import Scorable
from engine.spec.reward import RewardBase


def scorable(response: str, answer: str = "", tokens: int = 1, of: int = 10, **metadata: Any) -> Scorable:
    """A response to a prompt with that reference answer."""
    prompt = Prompt(id="p", token_ids=(1,), text="question", answer=answer, metadata=metadata)
    return Scorable(response, prompt, tokens, of, truncated=False)


def verdict(reward: RewardBase, response: str, answer: str = "", **metadata: Any) -> Verdict:
    """What the reward's function says, in this process."""
    return reward_function(reward)(Case(response, "question", answer, metadata, 1, 10))
