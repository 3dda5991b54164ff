"""The multi controller: every rank runs the dataflow on its own rows, and the roles are local objects (SPMD)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tensordict import TensorDict

from engine.batch import shard
from engine.controller.comm import DataParallelComm
from engine.controller.phases import PhaseClock, Timed
from engine.dataflows.roles import ActorRole, CriticRole, PolicyRole
from engine.hybrid_engine import HybridEngine, Transition
from engine.prompts import Prompt, PromptCursor
from engine.spec.train import TrainSpec
from engine.workers.reward import RewardWorker
from engine.workers.rollout import Rollout, sample_seed


@dataclass
class SwitchingRollout:
    """The rollout role on a hybrid engine: every call goes to generation and comes back to training."""

    rollout: Rollout
    engine: HybridEngine
    clock: PhaseClock
    release_memory: bool
    iteration: int = 0
    """Of the stage's policy; it decides the seeds, and is the version of the weights."""
    prompts: Sequence[Prompt] = ()
    """Of the last call; what its sample ids count in."""
    transitions: list[Transition] = field(default_factory=list)
    """Of the iteration."""

    def generate(self, prompts: Sequence[Prompt], *, greedy: bool = False) -> TensorDict:
        """See `engine.dataflows.roles.RolloutRole`."""
        self.prompts = prompts
        with self.clock.phase("transition"):
            self.transitions.append(self.engine.switch_mode("generate"))
        with self.clock.phase("generate"):
            batch = self.rollout.generate(prompts, self.iteration, self.iteration, greedy=greedy)
        with self.clock.phase("transition"):
            self.engine.switch_mode("train")
            if self.release_memory:
                self.engine.release()
        return batch


@dataclass
class Scoring:
    """A reward role that knows which prompts the rows of a batch belong to."""

    worker: RewardWorker
    rollout: SwitchingRollout

    def score(self, batch: TensorDict) -> TensorDict:
        """See `engine.dataflows.roles.RewardRole`."""
        return self.worker.score(batch, self.rollout.prompts, self.rollout.rollout.plan.samples_per_prompt)


@dataclass
class LocalRoles:
    """The roles of a job on this rank; `engine.dataflows.roles.Roles` says what each is for."""

    spec: TrainSpec
    clock: PhaseClock
    comm: DataParallelComm
    cursor: PromptCursor
    dp_rank: int
    rollout: SwitchingRollout
    actor: ActorRole
    reference: PolicyRole | None
    critic: CriticRole | None
    cost_critic: CriticRole | None
    reward: Scoring
    cost: Scoring | None

    def __post_init__(self) -> None:
        self.actor = Timed(self.actor, self.clock, logprobs="logprobs", update="update")
        self.reference = self.reference and Timed(self.reference, self.clock, logprobs="logprobs")
        self.critic = self.critic and Timed(self.critic, self.clock, values="values", update="update")
        self.cost_critic = self.cost_critic and Timed(self.cost_critic, self.clock, values="values", update="update")
        self.reward = Timed(self.reward, self.clock, score="score")
        self.cost = self.cost and Timed(self.cost, self.clock, score="score")

    @property
    def max_response_tokens(self) -> int:
        """The rollout's limit."""
        return self.spec.rollout.max_response_tokens

    def more_prompts(self) -> Sequence[Prompt]:
        """The next prompts of the set, as many as an iteration takes, the same on every rank."""
        return self.cursor.take(self.spec.prompts_per_iteration)

    def redistribute(self, batch: TensorDict) -> TensorDict:
        """Collect the rows of all ranks, whatever their number, and divide them as `generate` does."""
        seed = sample_seed(self.spec.seed, self.rollout.iteration, -1)
        return shard(self.comm.gather_batch(batch), self.spec.minibatches, self.spec.layout.dp, self.dp_rank, seed)
