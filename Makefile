# Two commands do everything on a fresh machine with Python 3.11: `make quickstart` and `make test`.
# Each installs what is missing into .venv; the second time they only run.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Quiet, loopback-only, deterministic Ray for embedded runs and tests.
export RAY_USAGE_STATS_ENABLED = 0

.PHONY: help install quickstart test lint browser docs site soundness chaos benchmarks clean

help:
	@echo "make quickstart  install, then train, certify and report a small real experiment"
	@echo "make test        install, then lint, type check and run the tests"
	@echo "make docs        rewrite the generated reference pages; make site: all of it as a web site"
	@echo "make soundness   the long soundness suite"
	@echo "make chaos       fault injection on a multi-node embedded cluster"
	@echo "make benchmarks  measure, and rewrite docs/benchmarks.md"

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --upgrade pip
	@echo "installing into $(VENV) (about two minutes)"
	$(BIN)/python -m pip install -qq -e ".[dev]"
	$(BIN)/python -m pip install -qq --no-deps auto_LiRPA==0.3
	@touch $@

install: $(STAMP)

quickstart: install
	$(BIN)/cure-ray quickstart

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet cure_ray tests analysis benchmarks studies examples
	$(BIN)/mypy

# The report is tested in a real browser: take the one that is there, or install Debian's where we may.
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
	{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && \
	  apt-get install -y -qq chromium chromium-driver >/dev/null; } || \
	echo "no browser found and none could be installed: the report's browser tests will be skipped"

test: lint browser
	$(BIN)/python -m pytest -q

docs: install
	$(BIN)/python docs/generate.py

site: docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict && echo "the site is in build/site"

soundness: install
	$(BIN)/python -m pytest -q -m soundness_long tests/soundness

chaos: install
	$(BIN)/python -m pytest -q -s -m chaos tests/chaos

# One after the other, on an otherwise idle machine; each rewrites its own section of docs/benchmarks.md.
benchmarks: install
	cd benchmarks && for b in training certify parallel_gp certify_scaling scaling tables geometric patch; do ../$(BIN)/python $$b.py || exit 1; done

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
