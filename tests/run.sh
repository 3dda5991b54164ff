#!/usr/bin/env bash
# Runs tests/engine in the engine's environment and tests/pipeline in the pipeline's, whatever the first one says, and
# prints pytest's closing lines last. Arguments go to pytest. The worst exit code wins; a suite without tests fails.
# Up to ten failures get a second try by themselves: real schedulers and eight-process groups on two busy cores miss
# deadlines that they keep alone. What fails twice fails; what only failed once is named in the log above. Tests whose
# subject is a race get no second try: one that is lost half the time would pass. Properties are tried on the same
# examples every time here (Hypothesis' profile `ci`), and on other ones whenever pytest is called by hand.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
logs=.ratchet/tests
mkdir -p "$logs" && rm -f "$logs"/*.log
races='tests/pipeline/chaos/|/test_fencing.py|/test_killed_saves.py'
export PYTEST_ADDOPTS="--hypothesis-profile=ci ${PYTEST_ADDOPTS:-}"
worst=0
for suite in engine pipeline; do
  echo "== tests/$suite in .venv/$suite"
  ".venv/$suite/bin/python" -m pytest "tests/$suite" --color="$([ -t 1 ] && echo yes || echo no)" "$@" 2>&1 \
    | tee "$logs/$suite.log"
  code=${PIPESTATUS[0]}
  failed=$(grep -c '^\(FAILED\|ERROR\) ' "$logs/$suite.log")
  raced=$(grep -cE "^(FAILED|ERROR) .*($races)" "$logs/$suite.log")
  if [ "$code" -eq 1 ] && [ "$failed" -le 10 ] && [ "$raced" -eq 0 ]; then
    echo "== $failed failed; a second try by themselves" | tee -a "$logs/$suite.log"
    ".venv/$suite/bin/python" -m pytest "tests/$suite" --last-failed --last-failed-no-failures none "$@" 2>&1 \
      | tee -a "$logs/$suite.log"
    code=${PIPESTATUS[0]}
  fi
  [ "$code" -gt "$worst" ] && worst=$code
  [ "$code" -eq 5 ] && echo "error: no test ran in tests/$suite" | tee -a "$logs/$suite.log"
  [ "$code" -eq 130 ] && break
done
echo
for suite in engine pipeline; do
  [ -f "$logs/$suite.log" ] && echo "$suite:" && tail -n 1 "$logs/$suite.log"
done
exit "$worst"
