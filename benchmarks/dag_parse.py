"""What `dags/` adds to Airflow's own import when a process parses them, as the DAG processor does.

Whole processes are timed, alternately with and without the DAG files, so that a busy machine slows both. Runs in the
pipeline's environment.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 5
AIRFLOW = "import airflow.sdk, airflow.models.dagbag"
HEAVY = ("torch", "vllm", "megatron", "transformers", "mlflow", "boto3", "pandas", "ray")
PARSE = f"""{AIRFLOW}
import json, runpy, sys, time
from pathlib import Path
seconds = {{}}
for file in sorted(Path({str(ROOT / 'dags')!r}).glob("*.py")):
    begin = time.perf_counter()
    runpy.run_path(str(file))
    seconds[file.stem] = time.perf_counter() - begin
print(json.dumps({{"seconds": seconds, "heavy": sorted(set({HEAVY!r}) & set(sys.modules))}}))
"""


def timed(code: str, home: str) -> tuple[float, str]:
    """Seconds that a fresh interpreter takes for `code`, and what it printed last."""
    environment = {**os.environ, "AIRFLOW_HOME": home, "PYTHONPATH": str(ROOT)}
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return time.perf_counter() - begin, done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


def main() -> None:
    """Print a table, and as the last line one JSON object."""
    alone, parsed = [], []
    with tempfile.TemporaryDirectory() as home:
        timed(PARSE, home)  # byte code and Airflow's configuration file
        for _ in range(ROUNDS):
            alone.append(timed(AIRFLOW, home)[0])
            seconds, said = timed(PARSE, home)
            parsed.append(seconds)
    found = json.loads(said)
    added = statistics.median(b - a for a, b in zip(alone, parsed, strict=True))
    print(f"{'Airflow alone':24}{statistics.median(alone):8.2f} s")
    print(f"{'with dags/':24}{statistics.median(parsed):8.2f} s")
    print(f"{'added':24}{added:8.2f} s   median of {ROUNDS} pairs")
    for name, value in found["seconds"].items():
        print(f"  {name:22}{value:8.2f} s   in the last process; the first file loads what the others share")
    print(f"heavy libraries loaded: {', '.join(found['heavy']) or 'none'}")
    print(json.dumps({"added_seconds": round(added, 3), "airflow_seconds": round(statistics.median(alone), 3),
                      "heavy": found["heavy"]}))


if __name__ == "__main__":
    main()
