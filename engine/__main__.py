"""`python -m engine STAGE JOB_DIR` runs one stage of a job; `python -m engine info` says what is installed.

Exit codes: 0 done; 2 the spec, the data or the model is wrong; 3 a fault that a retry can mend; 4 numerics; 130 killed.
"""

import ctypes
import faulthandler
import importlib
import os
import signal
import sys
import traceback
from pathlib import Path

from engine.errors import EXIT_FAULT, EXIT_KILLED, EXIT_NUMERICS, EXIT_REFUSED, RefusedError, SpecError, exit_code_of

PR_SET_PDEATHSIG = 1
STAGES = ("prepare", "finetune", "train", "evaluate", "report")
USAGE = f"usage: python -m engine {{{','.join(STAGES)}}} JOB_DIR | python -m engine info [--json]"


def main(arguments: list[str]) -> int:
    """Run what the command line asks for and return the exit code."""
    if arguments[:1] == ["info"]:
        from engine.info import main as info

        return info(arguments[1:])
    if len(arguments) != 2 or arguments[0] not in STAGES:
        print(USAGE, file=sys.stderr)
        return EXIT_REFUSED
    signal.signal(signal.SIGTERM, _stop)
    stage, directory = arguments[0], Path(arguments[1])
    if world_size_of(stage, directory) > 1 and "WORLD_SIZE" not in os.environ:
        return start_ranks(stage, directory)
    return run_stage(stage, directory)


def world_size_of(stage: str, directory: Path) -> int:
    """Ranks the job needs; 1 when its spec cannot be read, so that one process says why."""
    from engine.spec import EvaluateSpec, TrainingSpec, load_spec

    try:
        spec = load_spec(directory)
    except SpecError:
        return 1
    if isinstance(spec, TrainingSpec):
        return spec.layout.world_size
    return spec.world_size if isinstance(spec, EvaluateSpec) else 1


def start_ranks(stage: str, directory: Path) -> int:
    """Start the ranks of a job on this machine and return the exit code of the one that failed.

    torchrun's own command would turn every failure into exit 1.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from engine.ranks import serve_store

    store = serve_store()
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=world_size_of(stage, directory), run_id=directory.name,
        rdzv_backend="static", rdzv_endpoint=f"127.0.0.1:{store.port}", rdzv_configs={"rank": 0},
        local_addr="127.0.0.1", max_restarts=0, monitor_interval=0.2)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // config.nproc_per_node)))
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "engine", stage, str(directory))
    except ChildFailedError as error:
        # A rank that refuses takes its peers along: they die of the broken connection, some in the same moment.
        codes = {failure.exitcode for failure in error.failures.values()}
        return next((code for code in (EXIT_REFUSED, EXIT_NUMERICS) if code in codes), EXIT_FAULT)
    except KeyboardInterrupt:
        return EXIT_KILLED
    return 0


def run_stage(stage: str, directory: Path) -> int:
    """Run one rank of a stage in this process."""
    from engine.job import Job, print_error
    from engine.spec import load_spec

    if "WORLD_SIZE" in os.environ:
        # A rank must not outlive the process that started it; nobody else would end it.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    spec = None
    try:
        spec = load_spec(directory)
        if spec.stage != stage:
            raise SpecError(f"{directory}: the spec is of stage {spec.stage!r}, not {stage!r}")
        job = Job(directory, rank=int(os.environ.get("RANK", "0")))
        # The wrapper of a job that hangs asks for the stacks of all threads before it ends it.
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        job.start_heartbeat()
        job.event("start", stage=stage, pid=os.getpid())
        job.progress("start")
        job.result(importlib.import_module(f"engine.{stage}").run(job, spec))
        job.event("done", stage=stage)
        return 0
    except KeyboardInterrupt:
        return EXIT_KILLED
    except Exception as error:
        if not isinstance(error, RefusedError):
            traceback.print_exc()
        print_error(error, spec)
        return exit_code_of(error)


def _stop(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Gloo's and vLLM's destructors can hang or crash after the result is written.
    os._exit(code)
