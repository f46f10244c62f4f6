# Two commands do all the set-up: `make demo` and `make test`.
SHELL := bash
.DEFAULT_GOAL := help
.PHONY: help setup model lock demo test test-long fmt lint types imports check ci bench bench-peers clean \
    generated helm-tools helm-schema helm-lint

VENV := .venv
BIN := $(VENV)/bin
LOCK_KEY := $(shell cat requirements/*.lock requirements/torch.txt pyproject.toml | cksum | cut -d' ' -f1)
STAMP := $(VENV)/.sluice-$(LOCK_KEY)
PY_DIRS := core blockmgr transfer engine ranks prefill decode router deploy bench tests helm
PYTEST := $(BIN)/python -m pytest
PYTEST_ARGS ?=
BENCH ?= serve

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(STAMP) ## Create .venv from the lock (once per lock)

$(STAMP):
	@python=$$(bash requirements/find_python.sh) && \
	    bash requirements/install.sh "$$python" $(VENV) $(STAMP)

model: setup ## Fetch the default model (once)
	@$(BIN)/sluice fetch >/dev/null

demo: model ## Start 1 prefill + 1 decode worker, answer five prompts, stop
	@$(BIN)/sluice demo

test: model ## Run the tests, but for the slow ones
	@$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-long: model ## Run the slow tests
	@$(PYTEST) -m slow $(PYTEST_ARGS)

fmt: setup ## Format the code
	@$(BIN)/ruff format $(PY_DIRS) && $(BIN)/ruff check --fix $(PY_DIRS)

lint: setup ## Check style
	@$(BIN)/ruff format --check $(PY_DIRS) && $(BIN)/ruff check $(PY_DIRS)

types: setup ## Check types
	@$(BIN)/pyright

imports: setup ## Check who may import whom
	@$(BIN)/lint-imports

helm-tools: setup ## Fetch helm, kubectl and a validator for the chart's tests (once)
	@bash helm/get_tools.sh $(BIN)/python

helm-schema: setup ## Put today's config fields into the chart's schema
	@$(BIN)/python -m deploy.config.chart_schema helm/sluice/values.schema.json

generated: helm-schema ## Write anew the files that are made from code
	@page=$$($(BIN)/python -m deploy.main config reference) && printf '%s\n' "$$page" >docs/configuration.md
	@$(BIN)/python -m deploy.observability helm/sluice >/dev/null

helm-lint: helm-tools ## Lint, render and validate the chart for every values file of its own
	@$(PYTEST) tests/helm -m "not slow" -q

check: lint types imports test ## What must pass before a change is done

ci: ## What CI runs
	@bash .ci/run

bench: model ## Run a benchmark: make bench BENCH=serve
	@$(BIN)/python -m bench.$(BENCH)

bench-peers: setup ## Make the environments of the systems we compare with
	@$(BIN)/python -m bench.peers

lock: ## Resolve requirements/cpu.lock anew
	@bash requirements/make_lock.sh

clean: ## Remove .venv and caches; the model cache stays
	@rm -rf $(VENV) .pytest_cache .ruff_cache .import_linter_cache .hypothesis build *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
