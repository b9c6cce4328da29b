# `make` lists the targets. Every target that needs the environment makes it first (tools/setup.py).
PYTHON ?= python3
VENV ?= .venv
TORCH ?=
# these only from the command line: a shell may have a MACHINE or a PROFILE of its own
PROFILE := quick
NOTEBOOK :=
SOURCE := measured
LABELS := en
MACHINE :=
PARAMS :=

RUN := $(VENV)/bin/python
# an environment that is there looks after itself
SETUP_PYTHON = $(or $(wildcard $(RUN)),$(PYTHON))
# `make record` needs no environment of ours: the one asked for, else ours if it is there, else python3
RECORD_PYTHON = $(if $(filter command environment,$(firstword $(origin PYTHON))),$(PYTHON),$(if $(wildcard $(RUN)),$(RUN),$(PYTHON)))

# Notebooks run in this environment's kernel, whatever kernels the user has, and never ask the network.
export JUPYTER_PREFER_ENV_PATH := 1
unexport JUPYTER_PATH
export HF_HUB_OFFLINE := 1

# a lower-case name would be passed over in silence, and the long default run would start
$(foreach name,profile notebook source labels machine params,$(if $(filter command,$(firstword $(origin $(name)))),\
  $(error $(name)=$($(name)): variables are spelled in capitals: PROFILE, NOTEBOOK, SOURCE, LABELS, MACHINE, PARAMS)))

.PHONY: help setup figures test lab bench calibrate record lock newest execute clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -E '^[a-z]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 18
	@echo "Variables of figures: PROFILE=smoke|quick|article NOTEBOOK=01 SOURCE=measured|recorded LABELS=en|zh"
	@echo "  MACHINE=<a folder of results/recorded> PARAMS=\"repeats=3 dtype=bfloat16\""
	@echo "Variables of the environment: PYTHON=python3.12 VENV=<folder> TORCH=skip (bring your own build)"

setup:
	@command -v $(SETUP_PYTHON) >/dev/null || { echo "$(PYTHON) is not here: install Python 3.11 or newer, or call make with PYTHON=/path/to/python" >&2; exit 2; }
	@$(SETUP_PYTHON) -I -S tools/setup.py --venv "$(VENV)" --torch "$(TORCH)"

figures: setup ## run the notebooks, write every chart and table to figures/
	@$(RUN) -m pdlib.runner figures --profile '$(PROFILE)' --notebook '$(NOTEBOOK)' --source '$(SOURCE)' --labels '$(LABELS)' --machine '$(MACHINE)' --params '$(PARAMS)'

test: setup ## style, types and every test
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy pdlib
	$(RUN) -m pytest --numprocesses 2 --dist loadfile # most tests keep one core busy

lab: setup ## open the notebooks in JupyterLab
	@$(RUN) -m jupyterlab --notebook-dir=notebooks $(if $(filter 0,$(shell id -u)),--allow-root) # in a container one is root

bench: setup ## measure our kernels beside the article's loop and the library's
	@$(RUN) -m benchmarks

calibrate: setup ## a minute: fit the latency model to this machine, rows and fit to results/
	@$(RUN) -m pdlib.calibrate

record: ## on a GPU machine: measure the article's experiments, write rows to results/
	@$(RECORD_PYTHON) -m pdlib.record

lock: ## resolve pyproject.toml anew: requirements.lock and environment.yml (PYTHON=python3.11)
	@$(PYTHON) tools/lock.py

newest: ## the tests on the newest releases that pyproject.toml allows, in .venv-newest
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --upgrade $(or $(TORCH),torch) -e '.[test]'
	.venv-newest/bin/python -m pytest

execute: setup ## run the committed notebooks in place and normalise them
	@$(RUN) -m pdlib.runner execute --notebook '$(NOTEBOOK)'

clean: ## remove build/ and the tools' caches; .venv, results/ and figures/ stay
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -path './.venv' -prune -o -name __pycache__ -type d -exec rm -rf {} +
