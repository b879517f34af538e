# Everything a person or CI runs. `make help` lists the targets.
PYTHON ?= python3
RUN := .venv/bin/python -m
DATA ?= .kvtier
VLLM ?= 0.32.0
NETFS ?= glusterfs-distribute glusterfs-replica moosefs
GUEST_NETFS ?= nfs nfs3

# Compiled tests and modules are kept beside them whatever the shell says: a third of what each process of a run imports.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.PHONY: help venv demo docs test test-all test-slow test-localcluster durations test-random test-vllm test-backends test-netfs test-netfs-guest stress-netfs check lint format types imports generate fresh golden cluster conformance e2e e2e-kind bench bench-janitor bench-operator test-gpu release-dry-run lock clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## /{printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: ## make .venv (packages are cached outside the checkout)
	@PYTHON="$(PYTHON)" .ci/venv.sh

demo: venv ## one KVCacheTier, two vLLM engines, one shared cache: prints the proof
	@exec $(RUN) kvtier_demo --data "$(DATA)/demo"

# Half the time of a test that starts something goes by waiting, so slow tests have more workers than processors.
EVERY := pytest tests --ignore tests/conformance --dist loadfile --no-loadscope-reorder

test: venv ## tests of up to a second: five minutes on two processors
	$(RUN) $(EVERY) -m "not slow and not gpu and not netfs" --numprocesses 2

test-all: venv ## all other tests that need no GPU and no Docker, and those of the tier with vLLM 0.33: 25 minutes on two processors
	$(MAKE) --jobs 2 --output-sync=line test-slow test-vllm VLLM=0.33.0
	$(MAKE) test-localcluster

test-slow: venv ## slow tests that need no GPU and no Docker: a part of test-all
	$(RUN) $(EVERY) -m "slow and not gpu and not netfs" --numprocesses 4

test-localcluster: venv ## the embedded cluster's own tests and its conformance: after a change of it, and a part of test-all
	$(RUN) pytest e2e/localcluster/tests tests/conformance --dist loadfile --numprocesses 3

durations: venv ## measure all tests, and record in tests/durations.json which of them are slow
	rm -f tests/durations.json
	$(RUN) $(EVERY) -m "not gpu and not netfs" --numprocesses 2 --write-durations

test-random: venv ## tests that draw their examples, with examples of their own; a failure prints how to have it again
	$(RUN) pytest tests -m "hypothesis and not gpu" --hypothesis-profile=random --numprocesses 2 --dist loadfile

# vLLM keeps what it found out about a model by name only: releases that share a cache find it out anew all the time.
test-vllm: venv ## the tier's tests and real engines with another release of vLLM: VLLM=0.33.0
	release=$$(.venv/bin/python .ci/vllm_release.py $(VLLM)) && export PYTHONPATH="$$release" && \
	    if [ -n "$$release" ]; then export VLLM_CACHE_ROOT="$$release/.cache"; fi && \
	$(RUN) pytest tests/connector/tier -m "not gpu and not engine" --numprocesses 2 --dist loadfile && \
	$(RUN) pytest tests/connector/tier/test_engine.py -m engine -k second_engine

test-backends: venv ## real engines with every connector that vLLM's CPU build can run, as they are rendered (redis-server; half an hour)
	@command -v redis-server > /dev/null || { echo "needs redis-server: apt-get install redis-server"; exit 1; }
	.venv/bin/python -m pip --quiet --disable-pip-version-check install --no-deps --upgrade --only-binary=:all: \
	    --target "$(DATA)/lmcache" lmcache==0.5.6 aiofile==3.12.3 caio==0.12.10 redis==8.1.0 \
	    opentelemetry-exporter-prometheus==0.66b2
	.venv/bin/python -m pip --quiet --disable-pip-version-check install --no-deps --upgrade --only-binary=:all: \
	    --target "$(DATA)/nixl" nixl==1.5.1 nixl-cu12==1.5.1
	PYTHONPATH="$(abspath $(DATA))/lmcache" $(RUN) pytest tests/operator/test_lmcache.py
	PYTHONPATH=.:connector:"$(abspath $(DATA))/lmcache":"$(abspath $(DATA))/nixl" $(RUN) e2e.backends --work "$(DATA)/backends"

test-netfs: venv ## network file systems with servers that fail, and the store's suites on each (root; half an hour)
	$(RUN) pytest tests/connector/netfs --timeout 300
	for kind in $(NETFS); do PYTHONPATH=e2e/netfs $(RUN) kvtier_netfs $$kind -- .venv/bin/python -m pytest tests/connector/store \
	    tests/connector/janitor tests/connector/faults/test_killed.py --basetemp {a}/suites --timeout 300 || [ $$? = 77 ] || exit 1; done

test-netfs-guest: venv ## the same of NFS and of the quotas of xfs, whose clients this kernel may lack, under a kernel of its own
	PYTHONPATH=e2e/netfs $(RUN) kvtier_netfs.guest -- .venv/bin/python -m pytest tests/connector/netfs --timeout 300 -k "nfs or xfs or Xfs" || [ $$? = 77 ]
	for kind in $(GUEST_NETFS); do PYTHONPATH=e2e/netfs $(RUN) kvtier_netfs.guest -- .venv/bin/python -m kvtier_netfs $$kind -- \
	    .venv/bin/python -m pytest tests/connector/store tests/connector/janitor --basetemp {a}/suites --timeout 300 || [ $$? = 77 ] || exit 1; done

stress-netfs: venv ## engines, a janitor and servers on two mounts, killed at random for SECONDS (600), with a stall of 30 s
	PYTHONPATH=.:e2e/netfs $(RUN) e2e.bench.stress --seconds $(or $(SECONDS),600) --kind $(or $(KIND),glusterfs-distribute)

check: venv lint types imports house prose fresh docs ## what CI checks besides the tests

lint: venv ## ruff, and what checks workflows, shell scripts and Dockerfiles; a rule is silenced with a reason only
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	.venv/bin/python .ci/suppressions.py
	.venv/bin/python .ci/linters.py

format: venv ## let ruff rewrite what it can
	$(RUN) ruff format .
	$(RUN) ruff check --fix .

types: venv ## mypy --strict
	$(RUN) mypy

imports: venv ## who may import whom
	.venv/bin/python -c "from importlinter.cli import lint_imports_command as run; run()"

house: venv ## lines and modules by package, class names defined twice, import cycles; WRITE=1 lowers the record
	.venv/bin/python .ci/house.py $(if $(WRITE),--write)

prose: venv ## long sentences and private words in the code; IN=PATH prints all of a file or folder, WRITE=1 lowers the record
	.venv/bin/python .ci/prose.py $(if $(WRITE),--write) $(IN)

fresh: venv ## generated files agree with the code
	$(RUN) kvtier_operator.api.crd --check
	$(RUN) kvtier_operator.metrics --check
	.venv/bin/python .ci/helm.py --check
	.venv/bin/python .ci/chart_pages.py --check
	.venv/bin/python .ci/bundle.py --check
	.venv/bin/python .ci/metrics.py --check
	$(RUN) kvtier_monitoring --check
	.venv/bin/python .ci/image_locks.py --check
	PYTHONPATH=. $(RUN) e2e.backends --check
	.venv/bin/python .ci/figures.py --check

generate: venv ## rewrite the CRD, the API reference and the list of metrics from the code
	$(RUN) kvtier_operator.api.crd --write
	$(RUN) kvtier_operator.metrics --write
	.venv/bin/python .ci/helm.py --write
	.venv/bin/python .ci/chart_pages.py --write
	.venv/bin/python .ci/bundle.py --write
	.venv/bin/python .ci/metrics.py --write
	$(RUN) kvtier_monitoring --write
	.venv/bin/python .ci/image_locks.py --write
	PYTHONPATH=. $(RUN) e2e.matrix --write
	PYTHONPATH=. $(RUN) e2e.backends --write
	.venv/bin/python .ci/figures.py --write

golden: venv ## rewrite the golden manifests and plans; review the diff
	$(RUN) pytest tests/operator/test_golden.py tests/operator/test_crd.py tests/operator/test_digest.py tests/operator/test_chart.py --update-golden

docs: venv ## the documentation as a site in .kvtier/site; a dead link is an error
	.venv/bin/python .ci/site.py

cluster: venv ## an embedded cluster in the foreground: export KUBECONFIG as it says
	exec $(RUN) kvtier_localcluster up --data "$(DATA)/cluster"

conformance: venv ## what the embedded cluster promises, asked of the cluster of KUBECONFIG or KUBEBUILDER_ASSETS, or of itself
	CONFORMANCE_KUBECONFIG="$(KUBECONFIG)" CONFORMANCE_ASSETS="$(KUBEBUILDER_ASSETS)" $(RUN) pytest tests/conformance

e2e-kind: venv ## scenarios and conformance in a real cluster: kind, two workers, a shared volume, vLLM's CPU build (docker; half an hour)
	DATA="$(DATA)" bash e2e/kind/run.sh

e2e: venv ## the end-to-end tests alone: two real engines in the embedded cluster
	$(RUN) pytest tests -m engine

bench: venv ## measure a hit on the volume against vLLM's own fs tier on this machine's CPU
	PYTHONPATH=. exec .venv/bin/python e2e/bench/traffic.py --device cpu --out "$(DATA)/bench" kvtier:traffic:prepare \
	    kvtier:restart:single fs:traffic:prepare fs:restart:single none:restart:single

bench-operator: venv ## an operator where 1,000 and 10,000 tiers, 5,000 pods and 5,000 nodes stand
	PYTHONPATH=. exec $(RUN) e2e.bench.operator_scale --out "$(DATA)/bench-operator/scale.jsonl"

bench-janitor: venv ## the janitor at a million blocks, and under kill -9 for ten minutes
	PYTHONPATH=. $(RUN) e2e.bench.janitor --out "$(DATA)/bench/janitor-million.json"
	PYTHONPATH=.:e2e/netfs $(RUN) e2e.bench.stress --kind local > "$(DATA)/bench/janitor-stress.json"

test-models: venv ## classes of models in real engines, about three minutes each: CLASSES="dense mla" DEVICE=cpu SPLIT_HITS=Auto; then `make generate`
	PYTHONPATH=".:$$PYTHONPATH" $(RUN) e2e.matrix $(CLASSES) --device "$(or $(DEVICE),cpu)" --split-hits "$(or $(SPLIT_HITS),Off)" --data "$(DATA)/matrix"

test-gpu: ## the GPU path, on a machine with an NVIDIA GPU, vLLM, pytest and pytest-timeout
	$(PYTHON) -m pytest tests/connector/tier/test_engine.py -m gpu -s

release-dry-run: venv ## wheel, plugin, chart, bundle and images with what is here, and an installation in an embedded cluster
	.venv/bin/python .ci/release_dry_run.py "$(DATA)/release"

lock: venv ## resolve the locked versions anew, or with ONLY=--tools just what is new; `make generate` then locks the images
	.venv/bin/python .ci/lock.py $(ONLY)

clean: ## remove what the commands above left in the checkout
	rm -rf .venv .kvtier build dist .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find operator connector e2e tests -name __pycache__ -prune -exec rm -rf {} +
