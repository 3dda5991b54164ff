"""What scoring workers and the pool exchange: a case in, an outcome and a score back."""

from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import Any


class Outcome(IntEnum):
    """How the scoring of one response by one reward went."""

    SCORED = 0
    FORMAT_ERROR = 1
    """Scored, but the response does not have the form that the reward asks for."""
    ERROR = 2
    """The verifier raised, crashed, or returned no finite number: the score is `on_error`."""
    TIMEOUT = 3
    """The verifier was killed at its time limit: the score is `on_error`."""
    READY = 4
    """A worker's greeting, never a sample's: the score is its pid."""
    BEGUN = 5
    """A worker has received a chunk; never a sample's."""


@dataclass(frozen=True)
class Case:
    """What a reward function sees of a response and its prompt."""

    response: str
    prompt: str
    """Text of the last message."""
    answer: str
    metadata: dict[str, Any]
    num_response_tokens: int
    max_response_tokens: int


@dataclass(frozen=True)
class Verdict:
    """What a reward function says of a case."""

    score: float
    format_error: bool = False


RECORD = Struct("<IHBHd")
"""One result on the wire: row, reward, outcome, bytes of the message that follows, score."""
LENGTH = Struct("<I")
"""Before a chunk of work: bytes of its pickle."""
MAX_MESSAGE_BYTES = 500
