"""Stands in for `python -u -m engine STAGE JOB_DIR` in tests of the other side of the process boundary.

What a job does is read from the JSON file that RATCHET_FAKE_PLAN names: for each task (the end of the job directory's
path) a list of behaviours, one an attempt, the last one for all later attempts; under `scores` the mean reward of every
model, by a part of its URI; under `real` parts of the directories of jobs that the real engine does. A behaviour may
hold `seconds` to run, `exit` code, `ignore_sigterm`, `children` (processes in sessions of their own), `signal` (to die
by), `half_line` (to die in), `result` (outputs and metrics), `torn` (an unreadable result), `say` (lines to print),
`beats` and `moves` (seconds for which the heartbeat, and the progress in it, go on; it then only lives), `iteration`
(that it got to).
"""

import faulthandler
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

REAL_ENGINE = str(Path(__file__).resolve().parents[2] / ".venv" / "engine" / "bin" / "python")
CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def read_plan() -> dict:
    """The plan as it is now."""
    return json.loads(Path(os.environ["RATCHET_FAKE_PLAN"]).read_text())


def behaviour_of(directory: Path, attempt: int) -> dict:
    """What this attempt of this job shall do."""
    for task, attempts in read_plan().items():
        if str(directory).endswith(task):
            return attempts[min(attempt, len(attempts)) - 1]
    return {}


def default_result(stage: str, directory: Path, spec: dict) -> dict:
    """A result of the right shape, its files included."""
    if stage == "prepare":
        write_prompts(Path(spec["output"]), spec)
        return {"outputs": {"prompts": spec["output"]}, "hashes": {"prompts": "p" * 64}}
    if stage in ("finetune", "train"):
        export = Path(spec["export_dir"])
        export.mkdir(parents=True, exist_ok=True)
        (export / "model.safetensors").write_bytes(str(export).encode())
        for config in Path(spec["model"]).glob("config.json"):
            shutil.copy(config, export)
        from engine.store import hash_model_dir

        return {"outputs": {"checkpoint": spec["checkpoint_dir"], "export": str(export)}, "policy_version": 3,
                "hashes": {"weights": hash_model_dir(export), "spec": "s" * 64}, "metrics": {"reward/mean": 0.5}}
    if stage == "report":
        Path(spec["output"]).mkdir(parents=True, exist_ok=True)
        places = ("<!--verdict--><!--/verdict-->", "<!--gate--><!--/gate-->")
        Path(spec["output"], "report.html").write_text(f"<!doctype html><h1>{spec['title']}</h1>{places[0]}{places[1]}")
        return {"outputs": {"report": f"{spec['output']}/report.html"}}
    return evaluation(directory, spec)


def write_prompts(output: Path, spec: dict) -> None:
    """The manifest of prepared sets: what lineage reads. No rows."""
    from engine.store import sha256_file

    sets = {}
    for name in ("train", "eval", "sft", "sft_eval", "preferences", "preferences_eval"):
        files = [s["uri"] for s in (spec.get(name) or {}).get("sources", ()) if s["kind"] == "file"]
        sources = [{"uri": uri, "content": f"sha256:{sha256_file(uri)}", "sha256": sha256_file(uri)} for uri in files]
        if spec.get(name):
            sets[name] = {"rows": 8, "sha256": "r" * 64, "files": [], "counts": {}, "sources": sources}
    output.mkdir(parents=True, exist_ok=True)
    (output / "manifest.json").write_text(json.dumps(
        {"schema_version": 1, "sets": sets, "tokenizer": {"sha256": "t" * 64, "files": []}}))


def evaluation(directory: Path, spec: dict) -> dict:
    """60 prompts a model; the base fails them all, every other model solves what its score says."""
    from engine.store import hash_model_dir

    scores = read_plan().get("scores", {})
    models, metrics, samples = [], {}, []
    for model in spec["models"]:
        # Models are recognised by what they are, not by what this evaluation calls them: like weights would be.
        score = next((v for part, v in scores.items() if part in model["uri"]), 0.0)
        prompts = [{"id": f"p{i}", "task": "t", "greedy": float(i < 60 * score), "sampled": [float(i < 60 * score)] * 2,
                    "lengths": [4, 4, 4]} for i in range(60)]
        samples += [{"model": model["name"], "id": p["id"], "task": "t", "prompt": f"ask {p['id']}", "answer": "42",
                     "response": f"{score} ```\n<img src=x> | {p['id']}", "greedy": True, "score": p["greedy"],
                     "tokens": 4} for p in prompts]
        models.append({"model": model["name"], "uri": model["uri"], "weights_hash": hash_model_dir(model["uri"]),
                       "prompts_hash": "p" * 64, "settings_hash": "e" * 64, "prompts": prompts,
                       "metrics": {"mean_reward": score}})
        metrics[f"{model['name']}/mean_reward"] = score
    path = directory / "evaluation.json"
    path.write_text(json.dumps({"schema_version": 1, "pass_threshold": 1.0, "models": models}))
    (directory / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    outputs = {"evaluation": str(path), "samples": str(directory / "samples.jsonl")}
    return {"outputs": outputs, "metrics": metrics, "hashes": {"prompts": "p" * 64}}


def beat(directory: Path, beats_s: float, moves_s: float) -> None:
    """Write heartbeats for a while, as the engine's thread does; stacks on request, as the engine."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    for step in range(int(beats_s * 20)):
        moves = min(step, int(moves_s * 20))
        partial = directory / ".heartbeat"
        partial.write_text(json.dumps({"step": step, "moves": moves, "pid": os.getpid()}))
        partial.rename(directory / "heartbeat")
        time.sleep(0.05)


def main() -> int:
    """Act as an engine process."""
    stage, directory = sys.argv[-2], Path(sys.argv[-1])
    if any(run in str(directory) for run in read_plan().get("real", [])):
        os.execv(REAL_ENGINE, [REAL_ENGINE, "-u", "-m", "engine", stage, str(directory)])
    spec = json.loads((directory / "spec.json").read_text())
    while not (directory / "job.json").exists():
        time.sleep(0.01)
    do = behaviour_of(directory, json.loads((directory / "job.json").read_text())["attempt"])
    if do.get("ignore_sigterm"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(json.dumps({"event": "start", "s": 0.0, "stage": stage}), flush=True)
    for _ in range(do.get("children", 0)):
        subprocess.Popen([sys.executable, "-c", CHILD], start_new_session=True)
    for line in do.get("say", []):
        print(line, flush=True)
    (directory / "progress.json").write_text(json.dumps({"phase": stage, "iteration": do.get("iteration", 0)}))
    (directory / "started").touch()
    if "beats" in do:
        beat(directory, do["beats"], do.get("moves", 0))
    time.sleep(do.get("seconds", 0))
    if "half_line" in do:
        print(do["half_line"], end="", flush=True)
    if "signal" in do:
        os.kill(os.getpid(), do["signal"])
    if do.get("exit", 0):
        print(f"error: {stage}: the plan says so", file=sys.stderr, flush=True)
        return do["exit"]
    result = {"stage": stage, **default_result(stage, directory, spec), **do.get("result", {})}
    (directory / "result.json").write_text("{torn" if do.get("torn") else json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
