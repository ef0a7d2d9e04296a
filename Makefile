# `make help` lists the targets. Everything is installed into .venv, from pyproject.toml.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
TOOLS := $(VENV)/.installed-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
STAMP := $(VENV)/.built
CPP := $(shell find csrc tests/cpp -name '*.cc' -o -name '*.h' -o -name '*.inc' 2>/dev/null)
TIDIED := $(sort $(filter-out csrc/reduce/reduce_%,$(filter csrc/%.cc,$(CPP))))

.DEFAULT_GOAL := help
.PHONY: help install demo test cpp-test fuzz sanitize thorough conformance faults soak lint format bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP)  ## create .venv and install Paceline into it, with all tools

$(TOOLS): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Paceline needs Python 3.10 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --group build --group test --group lint
	@touch $@

$(STAMP): $(TOOLS) CMakeLists.txt csrc/CMakeLists.txt $(filter csrc/%,$(CPP))
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[plot,tune]'
	@touch $@

demo: install  ## the main job: a training with a late rank and thin links, four ways; a picture in out/
	@mkdir -p out
	$(BIN)/paceline demo --picture out/demo.png

test: install  ## the tests users and CI run
	$(PYTEST) -n auto tests/unit
	$(PYTEST) tests/conformance tests/integration

cpp-test:  ## the tests of the C++ core alone, without torch (needs GoogleTest: apt-get install libgtest-dev)
	tests/cpp/run.sh test

fuzz:  ## what parses bytes from the network, FUZZ_SECONDS (10) for each target
	tests/cpp/run.sh fuzz

sanitize: install  ## the C++ tests under address, undefined and thread sanitizers, and conformance under the first two
	tests/cpp/run.sh sanitize

thorough: install  ## the same tests with every combination, and properties on eighty times the examples
	EFFORT=20 $(PYTEST) -o timeout=1800 -n auto tests/unit
	EFFORT=20 $(PYTEST) -o timeout=1800 tests/conformance tests/integration

conformance: install  ## PyTorch's own distributed test-suite on Paceline, whole, with 3 and 8 ranks; reports in out/
	@mkdir -p out
	$(BIN)/python tests/conformance/pytorch_suite --backend paceline --report out/conformance.txt
	$(BIN)/python tests/conformance/pytorch_suite --backend paceline --speak mpi --report out/conformance_mpi.txt 'test_all_to_all*'
	$(BIN)/python tests/conformance/pytorch_suite --backend paceline --world-size 8 --report out/conformance8.txt

faults: install  ## 200 random faults each on one host, in the lab and of decentralised training: killed ranks, cut links
	FAULTS=200 $(PYTEST) tests/integration/test_faults.py tests/integration/test_engine_in_lab.py \
	  tests/integration/test_decentralized_faults.py

soak: install  ## mixed collectives on four ranks for SOAK_MINUTES (60), all checked; SOAK_SEED repeats a run
	$(BIN)/python tests/integration/soak.py

lint: install  ## ruff, mypy --strict, clang-format and clang-tidy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	@printf '%s\n' $(TIDIED) | xargs -P "$$(nproc)" -n 1 $(BIN)/clang-tidy --quiet --extra-arg=-Wno-unknown-warning-option \
	  -p $(firstword $(dir $(wildcard build/*/compile_commands.json)))

format: install  ## rewrite the code as lint wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

# A benchmark exits with 1 where it misses a goal: the others are measured all the same.
bench: install  ## time schedules, collectives and training beside Gloo, MPI and DDP; prints the tables of docs/performance.md
	@failed=0; for name in schedules collectives beside groups ddp training; do \
	  echo "python benchmarks/$$name.py"; $(BIN)/python "benchmarks/$$name.py" || failed=1; done; exit $$failed

clean:  ## remove everything that was built
	rm -rf $(VENV) build dist out .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
