# `make up` and `make test` are the two commands; both do all the set-up on a fresh machine (python3 >= 3.11, git, make).

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
EXTRAS := notebook,dashboard,reference,test
PIP := $(BIN)/python -m pip --disable-pip-version-check

# The first interpreter that really runs and is new enough (a name on PATH may be a shim of a version not selected).
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)

# What `make up` brings up: menagerie, smollm2, or the directory of a checkpoint.
MODEL ?= menagerie
TP ?= 2
ARGS ?=

# What holds families against their references.
FAMILY_TESTS := tests/engine/model/test_equality.py tests/engine/model/test_ling.py tests/engine/model/test_vision.py \
	tests/engine/model/test_kimi_k3.py tests/engine/model/test_kimi_vl.py tests/engine/parallel/test_meshes.py

.PHONY: help
help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

.PHONY: install
install: $(INSTALLED) ## make .venv and install the project with everything it needs

$(INSTALLED): pyproject.toml setup.py constraints.txt
	@[ -n "$(PYTHON)" ] || { echo "No Python 3.11 or newer was found; install one, or name it: make PYTHON=/path/to/python3"; exit 2; }
	@echo "installing into $(VENV): a few minutes the first time"
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q --no-compile -c constraints.txt "$$(grep '^torch==' constraints.txt)" setuptools
	$(PIP) install -q --no-compile -c constraints.txt --no-build-isolation -e '.[$(EXTRAS)]'
	@# pip would compile on one core; what no interpreter can read (templates of other projects) is left as it is.
	@$(BIN)/python -W ignore -m compileall -qq -j 0 $(VENV)/lib || true
	@# An interrupt that comes before Python runs a line of ours would end in words of Python's; where env can, it waits.
	@if env --block-signal=INT,TERM true 2>/dev/null; then \
		sed -i '1{/env -S/!s|^#!|#!/usr/bin/env -S --block-signal=INT,TERM |}' $(BIN)/firstlight; fi
	@touch $@

.PHONY: up
up: install ## the whole ladder on a sample: make up [MODEL=menagerie|smollm2|PATH] [TP=2] [ARGS=...]
ifeq ($(MODEL),menagerie)
	$(BIN)/firstlight up data/samples/menagerie --tp $(TP) $(ARGS)
else ifeq ($(MODEL),smollm2)
	checkpoint="$$($(BIN)/python data/samples/fetch_smollm2.py)" && $(BIN)/firstlight up "$$checkpoint" --pp 2 $(ARGS) # 9 heads
else
	$(BIN)/firstlight up "$(MODEL)" --tp $(TP) $(ARGS)
endif

.PHONY: test
test: lint types pytest ## format check, lint, types of the installed package, and all tests

# How many processes divide the tests, file by file, in the order of tests/conftest.py; 1 is all in one process.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n : 4)))
DIVIDED = -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: pytest
pytest: install ## the tests alone: make pytest [ARGS="tests/repo -k layout"] [WORKERS=1]
	@$(BIN)/python data/samples/fetch_smollm2.py >/dev/null # tests of the text model would be skipped without it
	$(BIN)/python -m pytest $(if $(filter-out 1,$(WORKERS)),$(DIVIDED)) $(ARGS)

.PHONY: lint
lint: install ## ruff: format and rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

.PHONY: fmt
fmt: install ## rewrite to the format and apply safe fixes
	$(BIN)/ruff check --fix-only -q .
	$(BIN)/ruff format -q .

# mypy does not follow the import hook of an editable install, so it is given a plain one of the tree as it stands.
.PHONY: types
types: install ## mypy on the installed package
	@rm -rf build/lib build/installed
	$(PIP) install -q --no-deps --no-build-isolation --target build/installed .
	@rm -rf build/lib
	MYPYPATH=build/installed $(BIN)/python -m mypy -p firstlight

.PHONY: gpu-check
gpu-check: install ## what needs an accelerator: operators against their references on the device, and the doctor's findings
	$(BIN)/firstlight doctor
	$(BIN)/python -m firstlight.kernels.bench --device cuda --check
	$(BIN)/python -m pytest -m gpu -rs $(ARGS)

.PHONY: bench
bench: install ## the benchmarks of tests/benchmarks, one after the other
	for file in tests/benchmarks/bench_*.py; do $(BIN)/python -m "tests.benchmarks.$$(basename "$$file" .py)" $(ARGS); done

FUZZ_SECONDS ?= 60

.PHONY: families
families: install ## hold every family against its reference, and write engine/model/families/README.md from the results
	$(BIN)/python -m pytest -q --junitxml=build/families.xml $(FAMILY_TESTS)
	$(BIN)/python -m tests.families.table build/families.xml

.PHONY: fuzz
fuzz: install ## search for input that breaks a parser, a minute each: make fuzz [FUZZ_SECONDS=600]
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[fuzz]'
	for target in $(notdir $(wildcard tests/fuzz/corpus/*)); do \
		$(BIN)/python -m tests.fuzz $$target -max_total_time=$(FUZZ_SECONDS) -verbosity=0 -print_final_stats=1; done

.PHONY: sweep
sweep: install ## try every architecture of transformers from outside, an hour of one core: make sweep [ARGS="flips glm4"]
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.sweep $(ARGS)

.PHONY: notebooks
notebooks: install ## execute every notebook; results as HTML in build/notebooks
	mkdir -p build/notebooks
	@# An answer that comes in pieces is one text on the page.
	$(BIN)/jupyter nbconvert --execute --to html --output-dir build/notebooks notebooks/*.ipynb \
		--HTMLExporter.preprocessors=nbconvert.preprocessors.CoalesceStreamsPreprocessor \
		--CoalesceStreamsPreprocessor.enabled=True

.PHONY: pictures
pictures: install ## take the pictures of README and the dashboard anew, on a quiet machine: make pictures [ARGS="dashboard loading notebook"]
	$(BIN)/python -m tests.pictures $(ARGS)

.PHONY: public-api
public-api: install ## accept the present public names: rewrites tests/repo/public_api.txt
	$(BIN)/python -m tests.repo.public_api

.PHONY: constraints
constraints: install ## rewrite constraints.txt from .venv, after a change of dependencies was tested
	{ sed -n '/^#/p; /^torch==/p' constraints.txt; \
	  $(PIP) freeze --all --exclude firstlight --exclude torch --exclude pip | sort -f; } > constraints.new
	mv constraints.new constraints.txt

.PHONY: clean
clean: ## remove builds and caches; .venv and runs stay
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
