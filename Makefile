# Every job of this repository. Needs GNU make, git, a Python >= 3.11 with venv, and a package registry for pip.
# Nothing here needs root, a key or a service.

SHELL := /bin/sh
BIN := .venv/bin

# A set-up is good for exactly this folder, these dependencies and this way of installing them.
KEY := $(shell { cat pyproject.toml constraints.txt; sed -n '/^define INSTALL/,/^endef/p' Makefile; pwd; } | cksum | tr -d ' ')
BENCH_KEY := $(shell { cat pyproject.toml bench/requirements.txt bench/constraints.txt; pwd; } 2>/dev/null | cksum | tr -d ' ')
STAMP := .venv/.ready-$(KEY)
BENCH_STAMP := bench/.venv/.ready-$(BENCH_KEY)

.DEFAULT_GOAL := help
.PHONY: help setup run doors agents test attack acp conformance upstreams soak mutants bench lint format docs clean

help: ## what there is
	@sed -n 's/^\([a-z]*\):.*## /\1|/p' Makefile | awk -F'|' '{ printf "  make %-11s %s\n", $$1, $$2 }'

setup: $(STAMP) ## install into .venv, once; at once the second time
	@:

# The first Python that is new enough and can make a virtual environment with pip in it. PYTHON=... overrides.
define FIND_PYTHON
found=; for candidate in $(PYTHON) python3.13 python3.12 python3.11 python3 python; do \
  if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found="$$candidate"; break; fi; \
done; \
if [ -z "$$found" ]; then \
  echo "make: no Python >= 3.11 with venv and ensurepip was found (on Debian and Ubuntu: python3-venv)." >&2; \
  echo "make: install one, or name it: make setup PYTHON=/path/to/python3.12" >&2; exit 1; \
fi
endef

# pip before 25.1 has no --group, so the one list of development tools is read from pyproject.toml here.
define INSTALL
PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -qq --require-virtualenv \
  --editable '.[all]' $$($(BIN)/python -c 'import tomllib; print(*(p.replace(" ", "") for p in tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["dev"]))')
endef

$(STAMP): pyproject.toml constraints.txt
	@set -e; $(FIND_PYTHON); \
	if ! $(BIN)/python -c 'import os, sys; sys.exit(sys.version_info < (3, 11) or os.path.realpath(sys.prefix) != os.path.realpath(".venv"))' 2>/dev/null; then \
	  echo "setup: a virtual environment in .venv with $$($$found --version)"; rm -rf .venv; "$$found" -m venv .venv; \
	fi; \
	echo "setup: installing handrail and its tools into .venv (a minute or two, once)"; \
	$(INSTALL); \
	$(BIN)/python -m compileall -q src; \
	rm -f .venv/.ready-*; touch $@; echo "setup: done"

run: setup ## the tour: an agent at work on a small repository, through the kernel
	@$(BIN)/python -m demos.tour

doors: setup ## four processes edit one file through one kernel, and the one that holds it is killed
	@$(BIN)/python -m demos.doors

agents: setup ## two agents hand work to each other over channels: one reviews, the other mends and tests
	@$(BIN)/python -m demos.pair

test: setup ## every test that is not marked slow
	@$(BIN)/python -m compileall -q src
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow"

attack: setup ## every attack of the suite, in a sandbox of its own, and a table of what held; JSON=file for the table as data
	@$(BIN)/python -m tests.attacks $(if $(JSON),--json $(JSON))

conformance: setup ## the official MCP conformance suite: our server, our gateway, our client, beside the SDK's own; ONLY="server client" for some, JSON=file
	@$(BIN)/python -m tests.mcp_suite $(if $(JSON),--json $(JSON)) $(ONLY)

acp: setup ## a public ACP client drives the agent: what it approves is done, what it denies is not
	@$(BIN)/python -m tests.acp_suite

upstreams: setup ## 35 odd MCP servers and nine public ones behind the gateway, offline, and 30 client libraries before Handrail; ONLY="mcp1 ts-sdk" for some libraries
	@$(if $(ONLY),:,$(BIN)/python -m tests.mcp_suite.upstreams)
	@$(BIN)/python -m tests.mcp_suite.client_libraries $(ONLY)

soak: setup ## the big counts
	@$(BIN)/python -m pytest -m slow --timeout 1800
	@$(BIN)/python -m pytest -m hypothesis --hypothesis-profile thorough --timeout 1800

mutants: setup ## nightly: break one line of each requirement row in a copy, and report what no test of the row notices; ROWS="K-04 S-11" for some
	@$(BIN)/python -m tests.mutants $(ROWS)

lint: setup ## style, types, room order, generated documents
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/pyright -p bench
	PYTHONPATH=src $(BIN)/lint-imports
	$(BIN)/python -m tests.conformance --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

format: setup ## let ruff lay the code out
	@$(BIN)/ruff check --fix-only --quiet . ; $(BIN)/ruff format .

docs: setup ## write the generated pages again and build the site into build/site, offline
	@$(BIN)/python -m tests.conformance
	@$(BIN)/python -m tests.terminal_pictures
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet && echo "docs: open build/site/index.html"

$(BENCH_STAMP): pyproject.toml bench/requirements.txt bench/constraints.txt
	@set -e; $(FIND_PYTHON); \
	if ! bench/.venv/bin/python -c 'import os, sys; sys.exit(os.path.realpath(sys.prefix) != os.path.realpath("bench/.venv"))' 2>/dev/null; then \
	  rm -rf bench/.venv; "$$found" -m venv bench/.venv; \
	fi; \
	echo "bench: installing handrail and its peers into bench/.venv (once)"; \
	PIP_CONSTRAINT=bench/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 bench/.venv/bin/python -m pip install -qq --require-virtualenv --editable '.[all]' -r bench/requirements.txt; \
	rm -f bench/.venv/.ready-*; touch $@

bench: setup $(BENCH_STAMP) ## every figure in the README, measured again beside its peers; ONLY=name for one
	@missed=; for script in bench/$(or $(ONLY),*).py; do \
	  echo; echo "== $$script"; bench/.venv/bin/python "$$script" || missed="$$missed $$script"; \
	done; if [ -n "$$missed" ]; then echo; echo "make: not met or not measured:$$missed" >&2; exit 1; fi

clean: ## remove what these commands made
	rm -rf .venv bench/.venv build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
