"""Megatron's DDP buffers and distributed optimizer for one network, stepped by our own rules."""

from typing import Any

import torch

from engine.backends.megatron.model import CausalLM
from engine.backends.megatron.parallel import World
from engine.backends.megatron.schedule import check_schedule, learning_rate
from engine.spec.train import OptimizerSpec
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


class Optimizer:
    """AdamW over dp-sharded fp32 main weights, with schedule and clipping."""

    def __init__(self, world: World, network: CausalLM, spec: OptimizerSpec, total_steps: int):
        """Wrap the network's parameters; their storage moves into one buffer, the `nn.Parameter`s stay.

        Raises:
            SpecError: the schedule cannot work.
        """
        check_schedule(spec, total_steps)
        self.world, self.spec, self.total_steps = world, spec, total_steps
        self.steps = 0
        """Optimizer steps so far, skipped ones included: the position in the schedule."""
        self.skipped_in_a_row = 0
        config = network.config
        self.wrapped = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
            network,
        )
        if world.dp_size > 1:
            self.wrapped.broadcast_params()
        else:
            _spare_collectives(self.wrapped)
        config.finalize_model_grads_func = _finalize
        self.megatron = get_megatron_optimizer(_optimizer_config(spec, config), [self.wrapped])
        for group in self.megatron.param_groups:
            # Megatron leaves this to its own scheduler: 0 for biases and norms, 1 for matrices.
            group["weight_decay"] = spec.weight_decay * group["wd_mult"]
        self.parts: list[DistributedOptimizer] = [
            part for part in self.megatron.chained_optimizers if not part.is_stub_optimizer]
        for part in self.parts:
            _prepare_adam(part)

    def zero_grad(self) -> None:
        """Clear gradients of the last step."""
        self.wrapped.zero_grad_buffer()
        self.megatron.zero_grad()

    def grad_norm(self) -> float:
        """Global 2-norm of the gradient, over all parameters of all ranks; the same on every rank."""
        self.megatron.prepare_grads()
        return float(self.megatron.get_grad_norm())

    def step(self, grad_norm: float, skip: bool) -> float:
        """Clip and apply the gradient, or only count the step; returns the learning rate.

        Args:
            grad_norm: result of `grad_norm()` for this step.
            skip: leave parameters and moments as they are.
        """
        lr = learning_rate(self.steps, self.spec, self.total_steps)
        self.steps += 1
        if skip:
            return lr
        for group in self.megatron.param_groups:
            group["lr"] = lr
        if grad_norm > self.spec.max_grad_norm:
            for part in self.parts:
                grads = [param.grad for param in part.get_parameters() if param.grad is not None]
                torch._foreach_mul_(grads, self.spec.max_grad_norm / grad_norm)
        self.megatron.step_with_ready_grads()
        return lr


def _optimizer_config(spec: OptimizerSpec, config: Any) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam", lr=spec.lr, weight_decay=spec.weight_decay, adam_beta1=spec.beta1, adam_beta2=spec.beta2,
        adam_eps=spec.epsilon, clip_grad=spec.max_grad_norm, bf16=config.bf16, params_dtype=config.params_dtype,
        use_distributed_optimizer=True)


def _finalize(model: list[Any], num_tokens: Any = None, **kwargs: Any) -> None:
    # Losses carry their denominators: Megatron must not divide by its own token count.
    finalize_model_grads(model, None, **kwargs)


def _spare_collectives(wrapped: DistributedDataParallel) -> None:
    """Without replicas there is nothing to reduce or gather; gloo would copy all parameters and gradients to itself."""
    for group in wrapped.bucket_groups:
        group.start_grad_sync = group.start_param_sync = lambda *args, **kwargs: None


def _prepare_adam(part: DistributedOptimizer) -> None:
    """Create Adam's moments now, so that a checkpoint can be loaded before the first step."""
    adam = part.optimizer
    for group in adam.param_groups:
        # One pass over memory instead of about ten.
        group["fused"], group["foreach"] = True, False
        for param in group["params"]:
            adam.state[param] = {
                "step": torch.zeros((), dtype=torch.float32, device=param.device),
                "exp_avg": torch.zeros_like(param.data),
                "exp_avg_sq": torch.zeros_like(param.data),
            }
