#!/usr/bin/env bash
# Resolves requirements/*.in into lock files. Versions already locked stay unless --upgrade is given.
# The CPU build of torch is found where pip finds it: PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
if ! command -v uv >/dev/null; then
  echo "error: make lock needs uv on PATH (pip install uv)" >&2
  exit 2
fi
export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}"
compile() {
  uv pip compile --quiet --python-version 3.11 --no-emit-find-links --no-emit-index-url \
    --custom-compile-command "make lock" "$@"
}
compile "$@" pipeline.in -o pipeline.txt
compile "$@" --override overrides.txt engine-cpu.in -o engine-cpu.txt
# `==2.13.0` also takes the local build `2.13.0+cpu` and prefers it; the reverse would shut out every other source.
compile "$@" trl.in -o trl.txt
sed -i 's/^\(torch==[0-9.]*\)+cpu$/\1/' engine-cpu.txt trl.txt
UV_FIND_LINKS="" compile "$@" engine-gpu.in -o engine-gpu.txt
compile "$@" --constraint engine-cpu.txt ray.in -o ray.txt
