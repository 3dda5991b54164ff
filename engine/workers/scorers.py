"""What scores responses by a list of rewards: the pool of processes, and reward models on the job's own ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tensordict import TensorDict
from torch import Tensor

from engine import store
from engine.errors import ModelError, SpecError
from engine.layout import check_layout, read_model_shape
from engine.rewards.pool import Scorable, Scores, ScoringPool
from engine.spec.reward import PooledReward, RewardBase, RewardModelReward, reward_names

if TYPE_CHECKING:
    from engine.backends.megatron.parallel import World
    from engine.backends.megatron.trainer import Model


@dataclass(frozen=True)
class RewardModel:
    """A frozen reward model."""

    model: "Model"

    def scores(self, batch: TensorDict) -> Tensor:
        """[B] float32 of whole sequences, the same on every rank of the replica, which all must call it."""
        from engine.backends.megatron.heads import score_head

        return self.model.forward(batch, score_head)["scores"].sum(dim=1)


@dataclass(frozen=True)
class Scorers:
    """The scorers of one rank."""

    rewards: Sequence[RewardBase]
    pool: ScoringPool | None
    """Of the rewards that are no models, on ranks that score; None elsewhere and where all are models."""
    models: Mapping[str, RewardModel] = field(default_factory=dict)
    """By the reward's name, on every rank that computes them."""

    @property
    def names(self) -> list[str]:
        """Of all rewards, in their order."""
        return reward_names(self.rewards)

    def model_scores(self, batch: TensorDict) -> dict[str, list[float]]:
        """[B] of each reward model by name; every rank of the replica must call it."""
        return {name: model.scores(batch).tolist() for name, model in self.models.items()}

    def score(self, items: Sequence[Scorable], of_models: Mapping[str, list[float]]) -> Scores:
        """What all rewards say.

        Args:
            items: [N] responses, read by the pool only.
            of_models: [N] from `model_scores`.
        """
        rows = len(next(iter(of_models.values()), items))
        scores = self.pool.score(items) if self.pool else Scores([0.0] * rows, {}, {}, [])
        for name, reward in zip(self.names, self.rewards, strict=True):
            if name in of_models:
                scores = scores.plus(name, reward, of_models[name])
        return scores


def pooled(rewards: Sequence[RewardBase]) -> list[PooledReward]:
    """The rewards that a `ScoringPool` computes."""
    return [reward for reward in rewards if isinstance(reward, PooledReward)]


def load_reward_models(rewards: Sequence[RewardBase], world: "World", policy_dir: str | Path,
                       microbatch_tokens: int) -> dict[str, RewardModel]:
    """The reward models among some rewards, by name, divided over the ranks as `world` says.

    Args:
        policy_dir: Hugging Face directory of the policy, whose tokenizer the models must share.
        microbatch_tokens: of one forward.
    Raises:
        SpecError: a URI that is no path. ModelError: no reward model there, or one of another tokenizer. LayoutError:
            the layout does not divide it.
    """
    return {name: _load(reward, world, policy_dir, microbatch_tokens)
            for name, reward in zip(reward_names(rewards), rewards, strict=True)
            if isinstance(reward, RewardModelReward)}


def _load(reward: RewardModelReward, world: "World", policy_dir: str | Path, microbatch_tokens: int) -> RewardModel:
    from transformers import AutoTokenizer

    from engine.backends.megatron.trainer import Model, load_network

    if store.is_s3(reward.model):
        raise SpecError(f"rewards: model {reward.model} must be a path that all ranks share, not an object store")
    check_layout(read_model_shape(reward.model), world.layout)
    ours, theirs = (AutoTokenizer.from_pretrained(str(path), local_files_only=True).get_vocab()
                    for path in (policy_dir, reward.model))
    if ours != theirs:
        raise ModelError(f"reward model {reward.model}: its vocabulary of {len(theirs)} tokens is not the policy's of "
                         f"{len(ours)}; train it from a model with the policy's tokenizer")
    network = load_network(reward.model, world, "values", scored=True)
    network.requires_grad_(False)
    return RewardModel(Model(world, network, microbatch_tokens))
