"""One training iteration by phase, beside TRL's GRPO trainer on the same model, prompts, group size and lengths.

    .venv/engine/bin/python benchmarks/iteration.py [--iterations 4] [--preset default] [--no-trl]

Runs the preset's train stage in this process on one rank and drops the first iteration, then TRL in its own environment
(.venv/trl, built from requirements/trl.txt when missing). Last line: one JSON object.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PHASES = ("generate", "score", "logprobs", "values", "update", "transition")


def specs(preset_file: Path, scratch: Path, iterations: int) -> tuple[dict, dict]:
    """The prepare and train specs of a preset, with everything written below `scratch`."""
    import yaml

    preset = yaml.safe_load(preset_file.read_text())
    model = ROOT / ".ratchet" / preset["model"]
    prepare = {"stage": "prepare", **preset["prepare"], "tokenizer": str(model), "output": str(scratch / "prompts")}
    train = {
        "stage": "train", **preset["train"], "iterations": iterations, "model": str(model),
        "prompts": str(scratch / "prompts"), "checkpoint_dir": str(scratch / "checkpoints"),
        "export_dir": str(scratch / "export")}
    return prepare, train


def run_stage(spec: dict, directory: Path) -> dict:
    """Run a stage as its own process and return its result."""
    directory.mkdir(parents=True)
    (directory / "spec.json").write_text(json.dumps(spec))
    with (directory / "log.txt").open("w") as log:
        done = subprocess.run([sys.executable, "-m", "engine", spec["stage"], str(directory)], cwd=ROOT, stdout=log,
                              stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        sys.exit(f"error: {spec['stage']} exited {done.returncode}; see {directory}/log.txt: "
                 f"{(directory / 'log.txt').read_text().strip().splitlines()[-1]}")
    return json.loads((directory / "result.json").read_text())


def measure_ratchet(train: dict, directory: Path) -> dict:
    """Medians over the iterations after the first."""
    result = run_stage(train, directory)
    rows = [json.loads(line)["metrics"] for line in (directory / "metrics.jsonl").read_text().splitlines()][1:]

    def median(name: str) -> float:
        return statistics.median(row.get(name, 0.0) for row in rows)

    seconds = {phase: median(f"time/{phase}_s") for phase in PHASES}
    iteration = median("time/iteration_s")
    return {
        "seconds": seconds, "iteration_s": iteration, "other_s": median("time/other_s"),
        "overhead_share": statistics.median(row["time/other_s"] / row["time/iteration_s"] for row in rows),
        "samples_per_s": median("time/samples_per_s"), "logprob_gap": max(row["rollout/logprob_gap"] for row in rows),
        "peak_gb": {name.split("/")[1].removesuffix("_bytes"): value / 1e9 for name, value in result["metrics"].items()
                    if name.startswith("memory/")}}


def measure_trl(train: dict, scratch: Path) -> dict:
    """The same job in TRL, in its own environment."""
    built = subprocess.run([sys.executable, str(ROOT / "requirements" / "environments.py"), "--benchmark"], check=False)
    if built.returncode:
        sys.exit("error: the environment of TRL could not be built; run with --no-trl to do without")
    from engine.prompts import PromptSet

    prompts = [{"prompt": [*p.messages], "answer": p.answer} for p in PromptSet.open(train["prompts"], "train")]
    job = scratch / "trl.json"
    job.write_text(json.dumps({"train": train, "prompts": prompts[: 4 * train["prompts_per_iteration"]
                                                              * train["iterations"]], "output": str(scratch / "trl")}))
    done = subprocess.run([str(ROOT / ".venv/trl/bin/python"), str(ROOT / "benchmarks/trl_grpo.py"), str(job)],
                          stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit("error: TRL's run failed; its traceback is above")
    return json.loads(done.stdout.strip().splitlines()[-1])


def report(ours: dict, trl: dict | None) -> None:
    """Table for people, JSON for machines."""
    print(f"{'phase':12} {'seconds':>9} {'share':>7}")
    for phase, value in [*ours["seconds"].items(), ("other", ours["other_s"])]:
        print(f"{phase:12} {value:9.3f} {value / ours['iteration_s']:7.1%}")
    print(f"{'iteration':12} {ours['iteration_s']:9.3f}")
    print("peak memory  " + "  ".join(f"{phase} {value:.2f} GB" for phase, value in sorted(ours["peak_gb"].items())))
    print(f"logprob gap  {ours['logprob_gap']:.2e} nats (largest iteration's mean)")
    print(f"Ratchet      {ours['samples_per_s']:9.3f} samples/s")
    figures = {
        "logprob_gap": ours["logprob_gap"], "overhead_share": ours["overhead_share"],
        "samples_per_s": ours["samples_per_s"], **{f"{phase}_s": value for phase, value in ours["seconds"].items()},
        "iteration_s": ours["iteration_s"]}
    if trl is not None:
        print(f"TRL {trl['version']:8} {trl['samples_per_s']:9.3f} samples/s, {trl['iteration_s']:.3f} s an iteration")
        figures |= {"over_trl": ours["samples_per_s"] / trl["samples_per_s"], "trl_samples_per_s": trl["samples_per_s"]}
    print(json.dumps(figures))


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="default")
    parser.add_argument("--iterations", type=int, default=4, help="including the first, which is dropped")
    parser.add_argument("--no-trl", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        preset = ROOT / "examples" / f"{options.preset}.yaml"
        prepare, train = specs(preset, scratch, options.iterations)
        from examples.models import make

        model = Path(train["model"])
        make(model.name, model)
        run_stage(prepare, scratch / "prepare")
        ours = measure_ratchet(train, scratch / "train")
        report(ours, None if options.no_trl else measure_trl(train, scratch))


if __name__ == "__main__":
    main()
