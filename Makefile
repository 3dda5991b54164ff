# `make demo` and `make test` build what is missing. Everything lives in this folder: .venv/ and .ratchet/.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory

# The one that is there; `make setup ENGINE=gpu` changes it.
ENGINE ?= $(shell grep -qs engine-gpu .venv/engine/.lock-sha256 && echo gpu || echo cpu)
PRESET ?= default
# trl_grpo is TRL's half of `iteration`, in TRL's environment.
BENCH ?= $(filter-out __% trl_grpo,$(notdir $(basename $(wildcard benchmarks/*.py))))
PIPELINE_BENCHMARKS := dag_parse pipeline recovery
KILLS ?= 200
SEED ?= 1

engine := .venv/engine/bin/python
pipeline := .venv/pipeline/bin/python

.PHONY: help setup check lint types test test-fast test-gpu demo bench chaos audit lock clean

help:  ## This list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 20

setup:  ## Build both environments from the lock files (ENGINE=cpu|gpu)
	@for python in python3.11 python3 python; do \
	  if $$python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then \
	    exec $$python requirements/environments.py --engine $(ENGINE); \
	  fi; \
	done; \
	echo "error: Python 3.11 is needed and none of python3.11, python3, python is one; install it (Debian: python3.11 python3.11-venv; or pyenv, conda) and put it on PATH" >&2; \
	exit 2

check: lint types test-fast  ## Lint, types, fast tests

lint: setup
	@.venv/pipeline/bin/ruff check .

types: setup
	@.venv/pipeline/bin/mypy

test: setup  ## All tests
	@bash tests/run.sh -m "not chaos"

test-fast: setup  ## Tests without the slow ones
	@bash tests/run.sh -m "not chaos and not slow"

test-gpu: setup  ## Tests that need CUDA devices (after make setup ENGINE=gpu)
	@$(engine) -m pytest tests/gpu -m gpu

demo: setup  ## Train, review and promote a model on this machine (PRESET=default|tiny|rlhf)
	@exec $(pipeline) -m examples.demo --preset $(PRESET)

bench: setup  ## All benchmarks, or BENCH="rollout iteration"
	@for name in $(BENCH); do \
	  case " $(PIPELINE_BENCHMARKS) " in *" $$name "*) python=$(pipeline);; *) python=$(engine);; esac; \
	  echo "== benchmarks/$$name.py"; $$python benchmarks/$$name.py; \
	done

chaos: setup  ## Kill a pipeline again and again: it must end with the same weights (KILLS=200 SEED=1)
	@CHAOS_KILLS=$(KILLS) CHAOS_SEED=$(SEED) $(pipeline) -m pytest tests/pipeline -m chaos -s

audit:  ## Look the lock files up in PyPI's advisories (a mirror without them is an error)
	@test -x .venv/audit/bin/pip-audit || { python3 -m venv .venv/audit && .venv/audit/bin/pip install -q pip-audit; }
	@.venv/audit/bin/pip-audit --strict --no-deps --disable-pip $(addprefix -r requirements/,pipeline.txt engine-cpu.txt engine-gpu.txt)

lock:  ## Resolve requirements/*.in into the lock files (UPGRADE=1 takes newer versions)
	@bash requirements/lock.sh $(if $(UPGRADE),--upgrade)

clean:  ## Remove environments, caches and .ratchet, with all models, runs and databases in it
	@rm -rf .venv .ratchet .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
