# `make demo` and `make test` need nothing but Python 3.11 with pip; each prepares .venv itself.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
FROM := pyproject.toml constraints.txt
PYTEST := $(BIN)/pytest -q -n 2 --dist worksteal

# The type checker would otherwise ask the package index for a newer version on every run.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

# What pytest writes for a file of tests halves the time of collecting them a second time.
test test-more test-all: export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo tpu test test-more test-all choose-tests lint format typecheck fuzz bench docs docs-site dist try-newer clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 16

demo: $(VENV)/.installed-demo ## port two real models and print the report
	$(BIN)/tpuport demo

tpu: $(VENV)/.installed-demo ## run everything on the TPU or GPU of this machine, write tpuport-measurement/
	@$(INSTALL) -e ".[$(if $(shell command -v nvidia-smi),gpu,tpu)]"
	$(BIN)/tpuport doctor --measure

# More processes than two want more than 16 GiB of memory. A process that is through takes tests from
# the other one: by whole files, a long one may come last.
test: $(VENV)/.installed-dev ## run the test suite
	$(PYTEST) -m "not slow and not covered"

test-more: $(VENV)/.installed-dev ## run what make test leaves out because other tests run its lines
	$(PYTEST) -m "covered and not slow"

test-all: $(VENV)/.installed-dev ## run both, and the slowest tests
	$(PYTEST) -m "slow or not slow"

choose-tests: $(VENV)/.installed-dev ## choose anew what make test leaves out
	rm -rf build/measured
	TPUPORT_MEASURED=build/measured $(PYTEST) -p tests.choosing
	$(BIN)/python -m tests.choosing build/measured

lint: $(VENV)/.installed-dev ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed-dev ## fix style and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: $(VENV)/.installed-dev ## run pyright
	$(BIN)/pyright --pythonpath $(BIN)/python

fuzz: $(VENV)/.installed-dev ## compare thousands of generated programs with their rewrites and ports
	TPUPORT_FUZZ=$(or $(TPUPORT_FUZZ),5000) $(BIN)/pytest -q tests/source/test_fuzz.py tests/source/test_fuzz_tensors.py
	$(BIN)/python -m benchmarks.whole_programs --count $(or $(TPUPORT_FUZZ),5000)
	$(BIN)/python -m benchmarks.stateful_scripts --count $(or $(TPUPORT_FUZZ),1000)
	$(BIN)/python -m benchmarks.asked_gradients --count $(or $(TPUPORT_FUZZ),1000)
	$(BIN)/python -m benchmarks.training_scripts --count $(or $(TPUPORT_FUZZ),1000)
	$(BIN)/python -m benchmarks.python_idioms --count $(or $(TPUPORT_FUZZ),1000)
	$(BIN)/python -m benchmarks.research_scripts --count $(or $(TPUPORT_FUZZ),1000)
	$(BIN)/python -m benchmarks.task_scripts --count $(or $(TPUPORT_FUZZ),1000)
	$(BIN)/python -m benchmarks.train_steps --count $(or $(TPUPORT_FUZZ),1000)
	$(BIN)/python -m benchmarks.block_stacks --count $(or $(TPUPORT_FUZZ),1000)
	$(BIN)/python -m benchmarks.aliased_containers --count $(or $(TPUPORT_FUZZ),1000)
	$(BIN)/python -m benchmarks.left_loops --count $(or $(TPUPORT_FUZZ),1000)
	$(BIN)/python -m benchmarks.switched_gradients --count $(or $(TPUPORT_FUZZ),1000)
	$(BIN)/python -m benchmarks.sharded_modules --count $(or $(TPUPORT_FUZZ),1000)
	$(BIN)/python -m benchmarks.sharded_training --count $(or $(TPUPORT_FUZZ),1000)
	$(BIN)/python -m benchmarks.transformed_functions --count $(or $(TPUPORT_FUZZ),1000)
	$(BIN)/python -m benchmarks.edited_modules --count $(or $(TPUPORT_FUZZ),1000)

bench: $(VENV)/.installed-dev ## run the benchmarks, write docs/benchmarks.*
	$(BIN)/python -m benchmarks

docs: $(VENV)/.installed-dev ## regenerate the generated pages of docs/
	@for script in docs/generate_*.py; do echo "$$script"; $(BIN)/python "$$script" || exit 1; done

docs-site: $(VENV)/.installed-site ## build the documentation as a site in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "build/site/index.html"

dist: $(VENV)/.installed-release ## build the wheel and the sdist in dist, and check both
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*

try-newer: $(BIN)/python ## test newer versions of torch, jax and torchax in an environment of its own
	$(BIN)/python -m benchmarks.newer_versions

clean: ## remove .venv and every cache
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || \
		{ echo "$(PYTHON) is not on PATH: install Python 3.11, or run make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# A stamp is older than a changed pyproject.toml or constraints.txt, so only those reinstall.
$(VENV)/.installed-demo: $(FROM) | $(BIN)/python
	@echo "Installing into $(VENV) (once; a few minutes)"
	@$(INSTALL) -e ".[jax,recipes]"
	@touch $@

$(VENV)/.installed-dev: $(FROM) | $(BIN)/python
	@echo "Installing into $(VENV) (once; a few minutes)"
	@$(INSTALL) -e ".[jax,recipes,openpilot,openpi,tpu,train,migrate,mcp,lsp,dev,docs]"
# Of someone else's model only its own files: what it depends on is for CUDA.
	@$(INSTALL) --no-deps hyvideo-fork openpi-client
	@touch $@ $(VENV)/.installed-demo

$(VENV)/.installed-site: $(VENV)/.installed-demo
	@$(INSTALL) -e ".[jax,site]"
	@touch $@

$(VENV)/.installed-release: $(FROM) | $(BIN)/python
	@$(INSTALL) build twine
	@touch $@
