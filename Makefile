# Everything a person or CI runs. `make help` lists the targets.
PYTHON ?= python3
RUN := .venv/bin/python -m
DATA ?= .kvtier
export PYTHONDONTWRITEBYTECODE := 1

.DEFAULT_GOAL := help
.PHONY: help venv demo test check lint format types imports generate fresh golden cluster e2e bench bench-janitor bench-operator test-gpu lock clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## /{printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: ## make .venv (packages are cached outside the checkout)
	@PYTHON="$(PYTHON)" .ci/venv.sh

demo: venv ## one KVCacheTier, two vLLM engines, one shared cache: prints the proof
	@exec $(RUN) kvtier_demo --data "$(DATA)/demo"

test: venv ## every test that needs no GPU and no Docker
	@# Engines take both processors each; everything else waits more than it computes.
	$(RUN) pytest tests -m "not gpu and not engine" --numprocesses 2 --dist loadfile
	$(RUN) pytest tests -m "engine and not gpu"

check: venv lint types imports fresh ## what CI checks besides the tests

lint: venv ## ruff: rules and format; a rule is silenced with a reason only
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	.venv/bin/python .ci/suppressions.py

format: venv ## let ruff rewrite what it can
	$(RUN) ruff format .
	$(RUN) ruff check --fix .

types: venv ## mypy --strict
	$(RUN) mypy

imports: venv ## who may import whom
	.venv/bin/python -c "from importlinter.cli import lint_imports_command as run; run()"

fresh: venv ## generated files agree with the code
	$(RUN) kvtier_operator.crd --check
	$(RUN) kvtier_operator.conditions_reference --check
	$(RUN) kvtier_operator.metrics --check
	.venv/bin/python .ci/helm.py --check
	$(RUN) kvtier_connector.tier.metrics_reference --check
	.venv/bin/python .ci/image_locks.py --check

generate: venv ## rewrite the CRD, the API reference and the list of metrics from the code
	$(RUN) kvtier_operator.crd --write crds
	$(RUN) kvtier_operator.conditions_reference --write
	$(RUN) kvtier_operator.metrics --write
	.venv/bin/python .ci/helm.py --write
	$(RUN) kvtier_connector.tier.metrics_reference --write
	.venv/bin/python .ci/image_locks.py --write

golden: venv ## rewrite the golden manifests and plans; review the diff
	$(RUN) pytest tests/operator/test_golden.py tests/operator/test_plan_command.py tests/operator/test_chart.py --update-golden

cluster: venv ## an embedded cluster in the foreground: export KUBECONFIG as it says
	exec $(RUN) kvtier_localcluster up --data "$(DATA)/cluster"

e2e: venv ## the end-to-end tests alone: two real engines in the embedded cluster
	$(RUN) pytest tests -m engine

bench: venv ## measure a disk hit against vLLM's own fs tier on this machine's CPU
	PYTHONPATH=. exec .venv/bin/python e2e/bench/engine_cpu.py --data "$(DATA)/bench"

bench-operator: venv ## 1,000 tiers at once, then rest, then five minutes of faults (about 25 minutes)
	PYTHONPATH=. exec $(RUN) e2e.bench.operators --out "$(DATA)/bench-operator"

bench-janitor: venv ## the janitor at a million blocks, under kill -9 for ten minutes, and with TRACE=FILE against exact LRU
	PYTHONPATH=. .venv/bin/python e2e/bench/janitor_million.py --out "$(DATA)/bench/janitor-million.json"
	PYTHONPATH=. .venv/bin/python e2e/bench/janitor_stress.py --out "$(DATA)/bench/janitor-stress.json"
	$(if $(TRACE),PYTHONPATH=. .venv/bin/python e2e/bench/janitor_replay.py "$(TRACE)" --out "$(DATA)/bench/janitor-replay.json")

test-gpu: ## the GPU path, on a machine with an NVIDIA GPU, vLLM, pytest and pytest-timeout
	$(PYTHON) -m pytest tests/connector/tier/test_engine.py -m gpu -s

lock: ## resolve the locked versions anew; `make generate` then locks the images
	$(PYTHON) .ci/lock.py

clean: ## remove what the commands above left in the checkout
	rm -rf .venv .kvtier build dist .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find operator connector e2e tests -name __pycache__ -prune -exec rm -rf {} +
