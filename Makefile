# Everything runs from .venv, which is built with pip from constraints.txt.
# Needs python3 (3.11 or later) with its venv module. No root, no C compiler.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Accelerate, Lightning, PEFT and Transformers, and what tests/integrations need beside them.
INTEGRATIONS := .venv-integrations
INTEGRATED := $(INTEGRATIONS)/.ready

# What is installed into which environment, in which versions.
$(READY): ENVIRONMENT := $(VENV)
$(READY): VERSIONS := constraints.txt
$(READY): WANTED := '.[torch,triton,fleet,ray,bench,dev]'
$(INTEGRATED): ENVIRONMENT := $(INTEGRATIONS)
$(INTEGRATED): VERSIONS := constraints-integrations.txt
# Few of their thousands of modules are imported: those are compiled, and kept, by the tests.
$(INTEGRATED): HASTE := --no-compile
$(INTEGRATED): WANTED := '.[torch,accelerate,lightning,peft,transformers]' hypothesis pytest pytest-timeout scikit-learn

PIP = $(ENVIRONMENT)/bin/python -m pip --disable-pip-version-check
INSTALL = install --quiet $(HASTE) --constraint $(VERSIONS)
# The build backend comes first: an isolated build would fetch its own, unpinned.
install = $(PIP) $(INSTALL) $(1) hatchling && $(PIP) $(INSTALL) $(1) --no-build-isolation --editable $(WANTED)

WHEELS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/shoestring/wheels
KEPT := --no-index --find-links $(WHEELS)
fetch = $(PIP) $(INSTALL) hatchling && $(PIP) download --quiet --constraint $(VERSIONS) \
	--no-build-isolation --dest $(WHEELS) hatchling $(WANTED)

TEST_INTEGRATIONS = PYTHONDONTWRITEBYTECODE= $(INTEGRATIONS)/bin/pytest --timeout 600 tests/integrations

# As many test processes as cores; one that has nothing left takes tests from another.
PYTEST = $(BIN)/pytest --numprocesses $(shell nproc) --dist worksteal

PEERS := .venv-peers
PEERS_PIP := PIP_CONSTRAINT=$(CURDIR)/constraints-peers.txt $(PEERS)/bin/python -m pip --disable-pip-version-check install --quiet

.DEFAULT_GOAL := help
.PHONY: help demo quick test lint docs golden dist integrations peers clean

help: ## List the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1|/' | awk -F'|' '{printf "make %-12s %s\n", $$1, $$2}'

demo: $(READY) ## Train over a slow link twice: uncompressed and with auto
	$(BIN)/shoestring demo --folder demo

quick: lint ## Run every check, and the tests of tests/quick.txt: some of every room
	$(PYTEST) -m "not slow" @tests/quick.txt

test: lint ## Run every check and every test, but those of the integrations
	$(PYTEST) -m "not alone"
	$(BIN)/pytest -m alone

docs: $(READY) ## Run the code blocks of every document
	$(PYTEST) tests/docs

lint: $(READY) ## Check style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

golden: $(READY) ## Write tests/golden/public_api.txt anew, to be read in the diff
	$(BIN)/python tests/unit/test_public_api.py

dist: $(READY) ## Build the wheel and the source archive into dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist

integrations: $(INTEGRATED) ## Run tests/integrations, in .venv-integrations: Accelerate, Lightning, PEFT, Transformers
	$(TEST_INTEGRATIONS)

peers: $(PEERS)/.ready ## Build .venv-peers: torchft and hivemind, for `python -m benchmarks.train`

clean: ## Remove .venv, .venv-integrations, caches and builds
	rm -rf $(VENV) $(INTEGRATIONS) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find shoestring tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Wheels are kept, so that a later clone needs no network. An environment that already holds the
# pinned versions, or a folder of wheels named by PIP_FIND_LINKS, needs none either.
$(READY): pyproject.toml constraints.txt
$(INTEGRATED): pyproject.toml constraints-integrations.txt
$(READY) $(INTEGRATED):
	test -x $(ENVIRONMENT)/bin/python || $(PYTHON) -m venv $(ENVIRONMENT)
	@echo "installing the versions of $(VERSIONS) into $(ENVIRONMENT)"
	@($(call install,$(KEPT))) 2>/dev/null || ($(fetch) && $(call install,$(KEPT))) || ($(call install))
	@touch $@

# PIP_CONSTRAINT rather than --constraint: it holds for what builds a source archive, too.
$(PEERS)/.ready: pyproject.toml constraints-peers.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	@echo "installing the versions of constraints-peers.txt into $(PEERS)"
	@$(PEERS_PIP) --find-links $(WHEELS) torch torchft-nightly hivemind numpy google-crc32c msgspec numba \
		psutil pyzmq rich safetensors typer hatchling
	@$(PEERS_PIP) --no-deps --no-build-isolation --editable .
	@touch $@
