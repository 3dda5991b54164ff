"""One transition from training to generation, three ways, on gloo processes of this machine.

    .venv/engine/bin/python benchmarks/reshard.py [--layers 12] [--hidden 1024] [--repeats 5] [--bucket-mib 64]

Ours, twice: replicas grouped as in HybridFlow, where the engine is free to place its ranks, and replicas of
neighbouring ranks, which vLLM's external launcher makes. Gathering every tensor on every rank and cutting slices out of
it (what verl, slime and OpenRLHF do). Writing a checkpoint that the other side reads. Megatron tp 4 x pp 2 -> tp 2 x 4
replicas, 8 ranks, fp32 on both sides; all are checked to leave the same bytes. The last line is JSON: `speedup_*` are
the grouped transfer's, `neighbours_*` the other's, bytes and memory the larger of both.
"""

import argparse
import itertools
import json
import multiprocessing as mp
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor

from engine.layout import GenerationLayout, ModelShape, ParallelLayout
from engine.resharding.boxes import full_box, relative
from engine.resharding.catalog import model_elements
from engine.resharding.cost import lower_bound
from engine.resharding.execute import SyncOptions, WeightSync
from engine.resharding.export import export_hf
from engine.resharding.load import load_hf
from engine.resharding.megatron import MegatronSharding
from engine.resharding.plan import grouped_ranks, plan_rank
from engine.resharding.safetensors_files import create_file
from engine.resharding.sharding import Holdings
from engine.resharding.views import view_of
from engine.resharding.vllm import VllmSharding

WORLD_SIZE = 8
TRAIN = ParallelLayout(tp=4, pp=2, dp=1)
SERVE = GenerationLayout(tp=2)


@dataclass
class Side:
    """A rank's memory under one layout."""

    holdings: Holdings
    params: dict[str, Tensor]


class GatherThenSlice:
    """Every tensor whole on every rank, one parameter at a time; then each rank keeps its slice."""

    def __init__(self, sharding: MegatronSharding, src: Side, dst: Side):
        self.src, self.dst, self.peak_bytes, self.received = src, dst, 0, 0
        layout, rank = sharding.layout, dist.get_rank()
        self.stage, self.tensor_rank = layout.coords(rank).pp, layout.coords(rank).tp
        self.stages = [list(layout.ranks_at(stage)) for stage in range(layout.pp)]
        self.tp_groups = [dist.new_group(ranks) for ranks in self.stages]
        self.pp_groups = [dist.new_group([ranks[index] for ranks in self.stages]) for index in range(layout.tp)]
        self.holdings = {rank: sharding.holdings(rank) for ranks in self.stages for rank in ranks}

    def run(self) -> None:
        """One transition."""
        self.peak_bytes = self.received = 0
        for stage, ranks in enumerate(self.stages):
            for name, shape in self.holdings[ranks[0]].params.items():
                self._one_param(stage, name, shape)

    def _one_param(self, stage: int, name: str, shape: tuple[int, ...]) -> None:
        ranks = self.stages[stage]
        pieces = [piece for rank in ranks for piece in self.holdings[rank].pieces if piece.param == name]
        tensors = {piece.tensor: self.src.holdings.tensors[piece.tensor].shape for piece in pieces}
        full = {tensor: torch.empty(size) for tensor, size in tensors.items()}
        shards = []
        if stage == self.stage:
            shards = [torch.empty(shape) for _ in ranks]
            dist.all_gather(shards, self.src.params[name], group=self.tp_groups[stage])
            self.received += sum(shard.nbytes for shard in shards[1:])
            for rank, shard in zip(ranks, shards, strict=True):
                for piece in (piece for piece in self.holdings[rank].pieces if piece.param == name):
                    target = full[piece.tensor][relative(piece.box, full_box(tensors[piece.tensor]))]
                    target.copy_(view_of(shard, piece, piece.box))
        for tensor in full.values():
            dist.broadcast(tensor, src=ranks[self.tensor_rank], group=self.pp_groups[self.tensor_rank])
            self.received += tensor.nbytes if stage != self.stage else 0
        held = sum(tensor.nbytes for tensor in (*full.values(), *shards))
        self.peak_bytes = max(self.peak_bytes, held)
        for tensor, value in full.items():
            for piece in self.dst.holdings.by_tensor.get(tensor, ()):
                view_of(self.dst.params[piece.param], piece, piece.box).copy_(
                    value[relative(piece.box, full_box(value.shape))])


def timed(transition: Callable[[], object], repeats: int) -> tuple[float, int]:
    """Median seconds of the slowest rank, and the largest growth of a rank's resident memory, in bytes."""
    seconds, growth = [], 0
    for _ in range(repeats):
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")
        before, start = memory("VmRSS"), time.perf_counter()
        transition()
        elapsed = torch.tensor([time.perf_counter() - start, float(memory("VmHWM") - before)], dtype=torch.float64)
        dist.all_reduce(elapsed, dist.ReduceOp.MAX)
        seconds.append(elapsed[0].item())
        growth = max(growth, int(elapsed[1].item()))
    return statistics.median(seconds), growth


def memory(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def write_template(directory: Path, tensors: dict) -> None:
    """The source directory an export takes names, dtypes and configuration from."""
    directory.mkdir()
    create_file(directory / "model.safetensors", {name: (torch.float32, t.shape) for name, t in tensors.items()})
    (directory / "config.json").write_text("{}")


class Transfer:
    """Our transition to one placement of the serving ranks, on this rank."""

    def __init__(self, train: MegatronSharding, serve: VllmSharding, src: Side, bucket_bytes: int):
        self.rank = dist.get_rank()
        self.dst = destination(serve.holdings(self.rank))
        begin = time.perf_counter()
        self.plan = plan_rank(train, serve, self.rank)
        self.plan_s = time.perf_counter() - begin
        self.sync = WeightSync(self.plan, src.params, self.dst.params, None, SyncOptions(bucket_bytes=bucket_bytes))
        self.place = serve.ranks.index(self.rank) % SERVE.tp
        self.versions = itertools.count()

    def measure(self, repeats: int) -> dict[str, float]:
        """Numbers of this rank, except the seconds and the growth, which are the slowest's and largest's."""
        # The first transfer takes the staging memory, which is kept.
        _, growth = timed(self.run, 1)
        seconds, _ = timed(self.run, repeats)
        return {"seconds": seconds, "growth": growth, "received": self.report.bytes_received,
                "bound": lower_bound(self.plan, 4), "peak": self.report.peak_extra_bytes}

    def run(self) -> None:
        """One transition."""
        self.report = self.sync.run(next(self.versions))


def destination(holdings: Holdings) -> Side:
    """Serving memory, touched once, so that the first transfer does not pay for the pages."""
    return Side(holdings, {name: torch.zeros(size) for name, size in holdings.params.items()})


def rank_main(rank: int, directory: str, shape: ModelShape, settings: tuple[int, int]) -> None:
    """One process."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    root, (repeats, bucket_bytes) = Path(directory), settings
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=WORLD_SIZE)
    train, serve = MegatronSharding(shape, TRAIN), VllmSharding(shape, SERVE, WORLD_SIZE)
    generator = torch.Generator().manual_seed(rank)
    holdings = train.holdings(rank)
    src = Side(holdings, {name: torch.randn(size, generator=generator) for name, size in holdings.params.items()})
    make_replicated_weights_equal(src.params)

    grouped = Transfer(train, serve.on(grouped_ranks(TRAIN.tp, TRAIN.pp, WORLD_SIZE, SERVE.tp)), src, bucket_bytes)
    rows = {"ours, grouped": grouped.measure(repeats)}
    left = {grouped.place: fingerprint(grouped.dst.params)}
    neighbours = Transfer(train, serve, src, bucket_bytes)
    rows["ours, neighbours"] = neighbours.measure(repeats)
    dst, want = neighbours.dst, fingerprint(neighbours.dst.params)
    check_equal_places([left, {neighbours.place: want}])

    gather = GatherThenSlice(train, src, dst)
    clear(dst.params)
    seconds, growth = timed(gather.run, repeats)
    assert fingerprint(dst.params) == want
    rows["gather, then slice"] = {
        "seconds": seconds, "growth": growth, "received": gather.received, "peak": gather.peak_bytes}

    if rank == 0:
        write_template(root / "template", train.tensors)
    dist.barrier()

    def reload() -> None:
        export_hf(root / "template", root / "exported", train, src.params)
        load_hf(root / "exported", dst.holdings, dst.params)

    clear(dst.params)
    seconds, growth = timed(reload, 1)
    assert fingerprint(dst.params) == want
    rows["write, then read"] = {"seconds": seconds, "growth": growth, "received": 0, "peak": 0}

    everyone: list = [None] * WORLD_SIZE
    dist.all_gather_object(everyone, rows)
    if rank == 0:
        print_report(shape, everyone, grouped.plan_s, bucket_bytes)
    dist.barrier()
    dist.destroy_process_group()


def check_equal_places(left: list[dict[int, list[int]]]) -> None:
    """A tensor rank has the same bytes in every replica and under both placements."""
    everyone: list = [None] * WORLD_SIZE
    dist.all_gather_object(everyone, left)
    known: dict[int, list[int]] = {}
    for place, found in (item for parts in everyone for part in parts for item in part.items()):
        assert known.setdefault(place, found) == found, f"tensor rank {place} differs"


def print_report(shape: ModelShape, ranks: list[dict], plan_s: float, bucket_bytes: int) -> None:
    """The table for people and the JSON line.

    Args: ranks: each rank's rows: name -> seconds, resident growth, bytes received, bound, counted extra bytes.
    """
    size = 4 * model_elements(shape)
    print(f"model {size / 4e6:.0f} M parameters, {size / 1e6:.0f} MB; Megatron {TRAIN} -> vLLM tp={SERVE.tp}, "
          f"{WORLD_SIZE} gloo processes, {os.cpu_count()} cores; own plan {plan_s * 1e3:.0f} ms")
    print(f"{'':22}{'seconds':>9}{'MB received, all ranks':>25}{'extra MB, counted':>20}{'extra MB, resident':>20}")
    seconds, over, peak = {}, {}, {}
    for name, row in ranks[0].items():
        received = sum(rank[name]["received"] for rank in ranks)
        seconds[name], peak[name] = row["seconds"], max(rank[name]["peak"] for rank in ranks)
        if "bound" in row:
            over[name] = received / sum(rank[name]["bound"] for rank in ranks)
        numbers = f"{row['seconds']:9.2f}{received / 1e6:25.0f}{peak[name] / 1e6:20.1f}{row['growth'] / 1e6:20.1f}"
        print(f"{name:22}{numbers}")
    grouped, neighbours, gathered, reloaded = seconds
    print(json.dumps({
        "speedup_vs_gather": round(seconds[gathered] / seconds[grouped], 2),
        "speedup_vs_reload": round(seconds[reloaded] / seconds[grouped], 2),
        "bytes_over_lower_bound": max(over.values()), "peak_extra_bytes": max(peak[grouped], peak[neighbours]),
        "bucket_bytes": bucket_bytes,
        "neighbours_speedup_vs_gather": round(seconds[gathered] / seconds[neighbours], 2),
        "neighbours_speedup_vs_reload": round(seconds[reloaded] / seconds[neighbours], 2)}))


def make_replicated_weights_equal(params: dict[str, Tensor]) -> None:
    """Norms are the same on all tensor ranks of a model; random ones must be made so."""
    for name, value in params.items():
        if "layernorm" in name:
            value.fill_(float(len(name)))


def clear(params: dict[str, Tensor]) -> None:
    """Zero everything, so that what is compared afterwards has really been written."""
    for value in params.values():
        value.zero_()


def fingerprint(params: dict[str, Tensor]) -> list[int]:
    """A hash of each parameter's bytes."""
    return [int(torch.hash_tensor(value).view(torch.int64)) for value in params.values()]


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bucket-mib", type=int, default=64)
    args = parser.parse_args()
    shape = ModelShape("llama", args.layers, args.hidden, 4 * args.hidden, 16, 8, args.hidden // 16, 16384, False)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    with tempfile.TemporaryDirectory() as directory:
        context = mp.get_context("spawn")
        ranks = [context.Process(target=rank_main, args=(rank, directory, shape, (args.repeats, args.bucket_mib << 20)))
                 for rank in range(WORLD_SIZE)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))


if __name__ == "__main__":
    main()
