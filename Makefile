# `make` alone lists what there is. Every target that needs the environment builds it first.
PYTHON   ?= python3.11
VENV     := .venv
PY       := $(VENV)/bin/python
STAMP    := $(VENV)/.installed
PIP      := $(PY) -m pip --disable-pip-version-check install
PIP_ARGS ?=
PROFILE  ?= sample
TORCH    := $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' requirements.lock)

export HF_HUB_OFFLINE         ?= 1
export TOKENIZERS_PARALLELISM ?= false
export GOMP_SPINCOUNT         ?= 0
export OMP_NUM_THREADS        ?= 2

.DEFAULT_GOAL := help
.PHONY: help env run train-sft train-shpo test sync outputs lab reproduce encoders results tables bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

env: $(STAMP)  ## build .venv from requirements.lock (PYTHON=python3.11, PIP_ARGS="..." for pip)

# The lock is complete, so pip resolves nothing. A torch that cannot be imported is a CUDA build without
# its libraries: then torch alone is installed again, with its dependencies, everything else held by the lock.
$(STAMP): requirements.lock pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) $(PIP_ARGS) --no-deps -r requirements.lock
	$(PIP) $(PIP_ARGS) --no-deps --no-build-isolation -e .
	$(PY) -c 'import torch' || $(PIP) $(PIP_ARGS) $(TORCH) -c requirements.lock
	touch $@

run: env  ## run the shipped sample: executed notebooks and a report in runs/sample
	$(VENV)/bin/memloc run sample

train-sft: env  ## train a locator: make train-sft PROFILE=sample|small|paper [DATA=folder] [NAME=run]; again after a break to go on
	$(VENV)/bin/memloc train-sft $(PROFILE) $(if $(DATA),--data '$(DATA)') $(if $(NAME),--name $(NAME)) $(ARGS)

train-shpo: env  ## train it on by its own replies: make train-shpo PROFILE=sample|small [SEED=13] [DATA=locomo10.json] [NAME=run]; again after a break to go on
	$(VENV)/bin/memloc shpo $(PROFILE) $(if $(SEED),-s seed=$(SEED)) $(if $(DATA),--data '$(DATA)') $(if $(NAME),--run runs/$(NAME)) $(ARGS)

WORKERS ?= 2
test: env  ## ruff, then every test on WORKERS processes: modules in sync, notebooks clean, outputs true, and the rest
	$(VENV)/bin/ruff check .
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(WORKERS) --dist worksteal

sync: env  ## write memloc/*.py from the notebooks and clean the notebooks
	$(VENV)/bin/nbdev_export
	$(VENV)/bin/nbdev_clean

outputs: sync  ## execute every notebook and store its cleaned outputs
	$(PY) -c 'from memloc.notebooks import project_notebooks, refresh_outputs; refresh_outputs(project_notebooks("."))'

lab: env  ## open the notebooks in JupyterLab
	$(VENV)/bin/jupyter lab --notebook-dir nbs

reproduce: env  ## run a profile on your data: make reproduce PROFILE=locomo DATA=file [NAME=run]
	$(VENV)/bin/memloc run $(PROFILE) $(if $(DATA),--data '$(DATA)') $(if $(NAME),--name $(NAME))

ENCODERS ?= minilm mpnet
encoders: env  ## Table 9: a profile once for each encoder: make encoders PROFILE=locomo DATA=file [ENCODERS="minilm mpnet models/contriever"]
	for encoder in $(ENCODERS); do $(VENV)/bin/memloc run $(PROFILE) $(if $(DATA),--data '$(DATA)') --name $(PROFILE)-$$(basename $$encoder) -p encoder=$$encoder $(ARGS) || exit 1; done

RUN      ?= runs/sample
results: env  ## keep the figures of a run: make results RUN=runs/locomo NAME=locomo [TABLES="located,evidence"]
	$(PY) -c 'from memloc.results import publish; publish("$(RUN)", "$(NAME)", "$(TABLES)")'

tables: env  ## write the paper's tables beside ours from the committed records, offline: nbs/results/tables
	$(PY) -c 'from memloc.paper_tables import write_tables; print(write_tables())'

bench: env  ## measure speed and print ratios, of a memory that grows and of a finished run: make bench [RUN=runs/locomo]
	OMP_NUM_THREADS=1 $(PY) tests/bench.py $(if $(filter-out file,$(origin RUN)),$(RUN))

clean:  ## remove caches and build leftovers; runs/ and .venv stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find memloc nbs tests -name __pycache__ -o -name .ipynb_checkpoints | xargs rm -rf
