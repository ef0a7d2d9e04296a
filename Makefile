# `make help` lists the targets. Everything is installed into .venv, from pyproject.toml.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
CPP := $(shell find csrc -name '*.cc' -o -name '*.h' 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help install demo test thorough lint format bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP)  ## create .venv and install Paceline into it, with all tools

$(STAMP): pyproject.toml CMakeLists.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Paceline needs Python 3.10 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --group build --group test --group lint
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[plot]'
	@touch $@

demo: install  ## the main job: a tour of schedules, with a picture in out/
	@mkdir -p out
	$(BIN)/paceline demo --picture out/late_rank.png

test: install  ## the tests users and CI run
	$(BIN)/python -m pytest

thorough: install  ## the same tests with twenty times the examples (about 20 minutes)
	EFFORT=20 $(BIN)/python -m pytest -o timeout=1800

lint: install  ## ruff, mypy --strict, and for C++ clang-format and clang-tidy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
ifneq ($(CPP),)
	clang-format --dry-run --Werror $(CPP)
	clang-tidy -p build $(filter %.cc,$(CPP))
endif

format: install  ## rewrite the code as lint wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install  ## time the schedule tools; prints the table of docs/performance.md
	$(BIN)/python benchmarks/schedules.py

clean:  ## remove everything that was built
	rm -rf $(VENV) build dist out .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
