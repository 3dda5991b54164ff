"""What a dataflow asks of the roles it is given. Every rank runs the dataflow on its own rows (SPMD)."""

from collections.abc import Sequence
from typing import Any, Protocol

from tensordict import TensorDict
from torch import Tensor

Metrics = dict[str, float]


class Comm(Protocol):
    """Exchange between data-parallel ranks. All of them call each method in the same order."""

    def gather(self, values: Tensor) -> Tensor:
        """[b] of this rank, b may differ and may be 0 -> [N] of all ranks in their order; dtype kept."""

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over the ranks; shape and dtype kept."""


class RolloutRole(Protocol):
    """Samples responses."""

    def generate(self, prompts: Sequence[Any], *, greedy: bool = False) -> TensorDict:
        """This rank's rows of a new batch: samples_per_prompt responses to each prompt, with sample ids p * G + g.

        greedy: one response of highest probability to each prompt, with sample ids p.
        """


class PolicyRole(Protocol):
    """The actor (writes old_logprobs, and full_kl when it is wanted) or the reference (writes what both are read from).

    The reference comes first: ref_logprobs, or for the full KL ref_states.
    """

    def logprobs(self, batch: TensorDict) -> TensorDict:
        """The batch with its logprobs."""


class ActorRole(PolicyRole, Protocol):
    """The policy that is trained."""

    def update(self, batch: TensorDict) -> Metrics:
        """All epochs and minibatches of `ActorObjective` on the batch; metrics `actor/*`, the same on every rank."""


class CriticRole(Protocol):
    """The value function."""

    def values(self, batch: TensorDict) -> TensorDict:
        """The batch with values [B, R]: slot r is the value before response token r."""

    def update(self, batch: TensorDict) -> Metrics:
        """All epochs and minibatches of `CriticObjective`; metrics `critic/*`, the same on every rank."""


class RewardRole(Protocol):
    """Scores whole responses."""

    def score(self, batch: TensorDict) -> TensorDict:
        """The batch with scores [B]."""


class Roles(Protocol):
    """The roles of a job. Those that the algorithm does not use are None."""

    rollout: RolloutRole
    actor: ActorRole
    reference: PolicyRole | None
    """None when `algorithm.needs_reference` is False."""
    critic: CriticRole | None
    """None when `algorithm.needs_critic` is False."""
    reward: RewardRole
    cost: RewardRole | None
    """Safe-RLHF: as `reward`, built from `algorithm.costs`."""
    cost_critic: CriticRole | None
    """Safe-RLHF: a second critic."""
    comm: Comm
    max_response_tokens: int
    """The rollout's limit."""

    def more_prompts(self) -> Sequence[Any]:
        """Dynamic sampling: the next prompts of the set, as many as an iteration takes, the same on every rank."""

    def redistribute(self, batch: TensorDict) -> TensorDict:
        """Dynamic sampling: collect the rows of all ranks, whatever their number, and divide them as `generate`."""
