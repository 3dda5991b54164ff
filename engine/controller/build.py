"""Builds the roles of a training job on every rank, in the order that memory and random states need."""

from dataclasses import dataclass
from pathlib import Path

from engine.backends.megatron.parallel import World
from engine.backends.megatron.trainer import Model, TrainedModel, load_network
from engine.backends.vllm.generator import Generator
from engine.backends.vllm.requests import GeneratorConfig
from engine.controller.comm import DataParallelComm
from engine.controller.multi import LocalRoles, Scoring, SwitchingRollout
from engine.controller.phases import PhaseClock
from engine.dataflows.objectives import ActorObjective, CriticObjective
from engine.hybrid_engine import HybridEngine
from engine.layout import ModelShape
from engine.prompts import PromptCursor, PromptSet
from engine.resharding.execute import WeightSync
from engine.resharding.megatron import MegatronSharding
from engine.resharding.plan import plan_rank
from engine.resharding.vllm import VllmSharding
from engine.rewards.pool import ScoringPool
from engine.spec.algorithm import SafeRLHF
from engine.spec.reward import Reward
from engine.spec.train import OptimizerSpec, TrainSpec
from engine.workers.actor import Actor
from engine.workers.critic import Critic
from engine.workers.reference import Reference
from engine.workers.reward import RewardWorker
from engine.workers.rollout import Replicas, Rollout, RolloutPlan
from engine.workers.scorers import Scorers, load_reward_models, pooled


@dataclass
class Assembly:
    """What a training job consists of on this rank."""

    roles: LocalRoles
    models: dict[str, TrainedModel]
    """Trained models by role: what a checkpoint holds."""
    pools: list[ScoringPool]


class Builder:
    """Builds roles from a spec; one per job."""

    def __init__(self, spec: TrainSpec, world: World, model_dir: Path, shape: ModelShape):
        """Args: model_dir: local Hugging Face directory of `spec.model`; shape: its sizes."""
        self.spec, self.world, self.model_dir, self.shape = spec, world, model_dir, shape
        self.pools: list[ScoringPool] = []

    def build(self, prompts: PromptSet, clock: PhaseClock) -> Assembly:
        """All roles the algorithm needs.

        Models first, then vLLM, which sizes itself by what is left; scoring processes before both, since they start
        beside them.
        """
        spec, algorithm = self.spec, self.spec.algorithm
        costs = isinstance(algorithm, SafeRLHF)
        pools = [self._scoring_pool(rewards) for rewards in (spec.rewards, algorithm.costs if costs else [])]
        actor = self._trained("logprobs", spec.actor)
        models = {"actor": actor}
        if algorithm.needs_critic:
            models["critic"] = self._trained("values", spec.critic)
        if costs:
            models["cost_critic"] = self._trained("values", spec.critic)
        reference = self._reference() if algorithm.needs_reference else None
        reward = self._reward(spec.rewards, pools[0])
        cost = self._reward(algorithm.costs, pools[1]) if costs else None
        rollout = self._rollout(actor, prompts, clock)
        roles = LocalRoles(
            spec=spec, clock=clock, comm=DataParallelComm(self.world.groups.dp),
            cursor=PromptCursor(prompts, spec.seed), dp_rank=self.world.dp_rank, rollout=rollout,
            actor=Actor(actor, ActorObjective(algorithm, spec.rollout.max_response_tokens), spec.rollout.temperature,
                        spec.epochs, reference and reference.policy),
            reference=reference, critic=self._critic(models, "critic"), cost_critic=self._critic(models, "cost_critic"),
            reward=Scoring(reward, rollout), cost=cost and Scoring(cost, rollout))
        return Assembly(roles, models, self.pools)

    def _trained(self, head: str, optimizer: OptimizerSpec) -> TrainedModel:
        spec = self.spec
        network = load_network(self.model_dir, self.world, head, sequence_parallel=spec.sequence_parallel)
        steps = optimizer.decay_steps or spec.iterations * spec.epochs * spec.minibatches
        return TrainedModel(self.world, network, spec.microbatch_tokens, optimizer, steps)

    def _reference(self) -> Reference:
        network = load_network(
            self.model_dir, self.world, "logprobs", sequence_parallel=self.spec.sequence_parallel)
        network.requires_grad_(False)
        return Reference(Model(self.world, network, self.spec.microbatch_tokens), self.spec.rollout.temperature,
                         whole=self.spec.algorithm.needs_full_kl)

    def _critic(self, models: dict[str, TrainedModel], name: str) -> Critic | None:
        if name not in models:
            return None
        return Critic(models[name], CriticObjective(self.spec.algorithm), self.spec.epochs)

    def _rollout(self, actor: TrainedModel, prompts: PromptSet, clock: PhaseClock) -> SwitchingRollout:
        spec, world = self.spec, self.world
        config = spec.rollout
        generator = Generator(self.model_dir, config.layout, GeneratorConfig(
            max_model_len=prompts.max_prompt_tokens + config.max_response_tokens, kv_cache_bytes=config.kv_cache_bytes,
            max_concurrent_sequences=config.max_concurrent_sequences, seed=spec.seed))
        plan = plan_rank(MegatronSharding(self.shape, spec.layout),
                         VllmSharding(self.shape, config.layout, world.size), world.rank)
        sync = WeightSync(plan, actor.params(), generator.params())
        engine = HybridEngine(generator, sync, lambda: switching.iteration)
        rollout = Rollout(engine.generate, Replicas(config.layout), RolloutPlan(
            samples_per_prompt=spec.algorithm.samples_per_prompt, max_response_tokens=config.max_response_tokens,
            temperature=config.temperature, seed=spec.seed, minibatches=spec.minibatches, dp=spec.layout.dp,
            dp_rank=world.dp_rank))
        switching = SwitchingRollout(rollout, engine, clock, config.release_memory)
        return switching

    def _scoring_pool(self, rewards: list[Reward]) -> ScoringPool | None:
        """Only the lead rank of each replica has one, and only where a reward is no model."""
        if not (self.world.is_lead and pooled(rewards)):
            return None
        self.pools.append(ScoringPool(pooled(rewards)))
        return self.pools[-1]

    def _reward(self, rewards: list[Reward], pool: ScoringPool | None) -> RewardWorker:
        models = load_reward_models(rewards, self.world, self.model_dir, self.spec.microbatch_tokens)
        scorers = Scorers(rewards, pool, models)
        return RewardWorker(scorers, self.model_dir, self.world, self.spec.rollout.max_response_tokens)
