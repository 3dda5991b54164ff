"""Plans for large models on many ranks: seconds and memory of a rank's own plan, and estimated transition times.

    .venv/engine/bin/python benchmarks/reshard_scale.py

No weights and no ranks: shapes only. Every plan is made in a process of its own, from nothing, so that its memory is
all its own. Estimates are nominal link speeds (NVLink 600 GB/s a GPU, 200 Gb/s a node), bf16, the busiest of the nodes
looked at. The last line is JSON.
"""

import json
import multiprocessing as mp
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine.layout import GenerationLayout, ModelShape, ParallelLayout
from engine.resharding.baselines import Strategy, strategy_ends
from engine.resharding.catalog import LatentShape, model_elements
from engine.resharding.cost import RankCost, lower_bound, rank_cost, transition_seconds
from engine.resharding.megatron import MegatronSharding
from engine.resharding.placement import PAPER_CLUSTER
from engine.resharding.plan import plan_rank
from engine.resharding.vllm import VllmSharding

LLAMA_70B = ModelShape("llama", 80, 8192, 28672, 64, 8, 128, 128256, False)
LLAMA_405B = ModelShape("llama", 126, 16384, 53248, 128, 8, 128, 128256, False)
QWEN3_235B = ModelShape("qwen3_moe", 94, 4096, 12288, 64, 4, 128, 151936, False, qk_norm=True, num_experts=128,
                        moe_ffn_hidden_size=1536)
DEEPSEEK_671B = LatentShape("deepseek_v3", 61, 7168, 18432, 128, 128, 128, 129280, False, num_experts=256,
                            moe_ffn_hidden_size=2048, q_lora_rank=1536, kv_lora_rank=512, rope_head_dim=64,
                            v_head_dim=128, num_dense_layers=3, num_shared_experts=1)
BYTES = 2


@dataclass(frozen=True)
class Case:
    """A model, how it is trained and how it is served."""

    name: str
    shape: ModelShape
    train: ParallelLayout
    serve_tp: int
    expert_parallel: bool = False


CASES = [
    Case("Llama-3-70B", LLAMA_70B, ParallelLayout(tp=8, pp=2, dp=4), 8),
    Case("Llama-3-70B", LLAMA_70B, ParallelLayout(tp=8, pp=4, dp=4), 8),
    Case("Llama-3-70B", LLAMA_70B, ParallelLayout(tp=8, pp=4, dp=128), 4),
    Case("Llama-3-405B", LLAMA_405B, ParallelLayout(tp=8, pp=14, dp=4), 16),
    Case("Llama-3-405B", LLAMA_405B, ParallelLayout(tp=16, pp=9, dp=28), 16),
    Case("Qwen3-235B-A22B", QWEN3_235B, ParallelLayout(tp=4, pp=2, dp=64, ep=16), 8),
    Case("Qwen3-235B-A22B", QWEN3_235B, ParallelLayout(tp=4, pp=2, dp=512, ep=32), 8, expert_parallel=True),
    Case("DeepSeek-V3-like 671B", DEEPSEEK_671B, ParallelLayout(tp=4, dp=1024, ep=64), 16),
    Case("DeepSeek-V3-like 671B", DEEPSEEK_671B, ParallelLayout(tp=4, dp=1024, ep=64), 32, expert_parallel=True),
    Case("DeepSeek-V3-like 671B", DEEPSEEK_671B, ParallelLayout(dp=4096, ep=256), 16),
]


def plan_one(case: Case, rank: int) -> dict:
    """A rank's plan from nothing: seconds, megabytes, bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    before, start = memory("VmRSS"), time.perf_counter()
    world_size = case.train.world_size
    src = MegatronSharding(case.shape, case.train)
    dst = VllmSharding(case.shape, GenerationLayout(case.serve_tp), world_size, expert_parallel=case.expert_parallel)
    plan = plan_rank(src, dst, rank)
    seconds = time.perf_counter() - start
    grown, cost = memory("VmHWM") - before, rank_cost(plan, BYTES)
    assert cost.received == lower_bound(plan, BYTES)
    return {"seconds": seconds, "mb": grown / 1e6, "transfers": len(plan.sends) + len(plan.recvs), "cost": cost}


def memory(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def strategy_costs(strategy: Strategy, nodes: list[int]) -> list[RankCost]:
    """Costs of all ranks of some nodes, for the paper's 70B case: pp 4, tp 8, dp 4 -> tp 8."""
    train, generate = ParallelLayout(tp=8, pp=4, dp=4), ParallelLayout(tp=8, dp=16)
    src, dst = strategy_ends(strategy, LLAMA_70B, train, generate)
    per_node = PAPER_CLUSTER.ranks_per_node
    ranks = [rank for node in nodes for rank in range(node * per_node, (node + 1) * per_node)]
    return [rank_cost(plan_rank(src, dst, rank), BYTES) for rank in ranks]


def sampled_nodes(case: Case) -> list[int]:
    """The first, a middle and the last node: the first and last stages hold the vocabulary tables."""
    count = case.train.world_size // PAPER_CLUSTER.ranks_per_node
    return sorted({0, count // 2, count - 1})


def main() -> None:
    """Print both tables."""
    worst_seconds = worst_mb = 0.0
    print(f"{'model':24}{'ranks':>6}  {'training':26}{'serving':14}{'plan s':>7}{'plan MB':>8}{'transfers':>10}"
          f"{'GB recv/rank':>13}{'est. s':>8}")
    for case in CASES:
        per_node, nodes = PAPER_CLUSTER.ranks_per_node, sampled_nodes(case)
        ranks = [node * per_node + index for node in nodes for index in range(per_node)]
        with mp.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
            plans = pool.starmap(plan_one, [(case, rank) for rank in ranks], chunksize=1)
        seconds, mb = max(plan["seconds"] for plan in plans), max(plan["mb"] for plan in plans)
        worst_seconds, worst_mb = max(worst_seconds, seconds), max(worst_mb, mb)
        costs = [plan["cost"] for plan in plans]
        serving = f"tp={case.serve_tp}" + (" ep" if case.expert_parallel else "")
        print(f"{case.name:24}{case.train.world_size:6}  {case.train!s:26}{serving:14}{seconds:7.2f}{mb:8.0f}"
              f"{max(plan['transfers'] for plan in plans):10}{max(cost.received for cost in costs) / 1e9:13.1f}"
              f"{transition_seconds(costs, PAPER_CLUSTER):8.2f}")
    size = BYTES * model_elements(LLAMA_70B)
    print(f"\nLlama-3-70B ({size / 1e9:.0f} GB), 128 GPUs, training 4-8-4 -> generation tp 8, point to point at "
          f"nominal speed (paper: 78.2 s -> 8.5 s measured)")
    for strategy in ("ds-chat", "hybridflow-v", "neighbours", "hybridflow"):
        costs = strategy_costs(strategy, [0, 8, 15])
        mean = sum(cost.received for cost in costs) / len(costs)
        print(f"{strategy:16}{mean / 1e9:8.1f} GB received per GPU{transition_seconds(costs, PAPER_CLUSTER):9.2f} s")
    print(json.dumps({"worst_plan_seconds": round(worst_seconds, 3), "worst_plan_mb": round(worst_mb, 1)}))


if __name__ == "__main__":
    main()
