# Every target does all of its own set-up. `make demo` and `make test` are the two to know.
#   PYTHON=/path/to/python   the Python to make .venv with (3.11 or 3.12; found when not given)

SHELL := /bin/sh
.DEFAULT_GOAL := help
BIN := .venv/bin

find_python = { \
  for p in $(PYTHON) python3.11 python3.12 python3 python; do \
    if "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; \
    then echo "$$p"; exit 0; fi; \
  done; \
  echo "error: no Python >= 3.11 on the PATH." >&2; \
  echo "remedy: install CPython 3.11 or 3.12 (Debian: apt install python3.11 python3.11-venv)," >&2; \
  echo "        or name one: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }

.PHONY: help venv lint format proto test simulate soak histories demo coverage reference bench lock clean \
	deploy-files deploy-tools test-deploy test-compose test-kube

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

venv: ## make or update .venv (nothing to do: 0.1 s)
	@python=$$($(find_python)) && "$$python" tools/setup_venv.py

lint: venv ## linter, formatter, types, import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: venv ## let the formatter and the safe fixes rewrite the sources
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

proto: venv ## generate shared/tierlog/proto from shared/proto
	$(BIN)/python tools/generate_proto.py

.PHONY: generated generated-check
generated: proto deploy-files reference coverage ## write anew all that is generated and committed

generated-check: venv ## fail when something committed is not what `make generated` writes
	$(BIN)/python tools/generate_proto.py --check
	$(BIN)/python -m tools.deploy_files --check
	$(BIN)/python -m tools.generate_reference --check
	$(BIN)/python tools/coverage_map.py --check

test: venv ## all tests, on real servers that are started and stopped
	$(BIN)/python -m tools.setup_go
	$(BIN)/python -m tools.setup_deploy
	$(BIN)/python -m tools.compile_cache --if-possible
	@# In their order, which has the long files first: else they come last, one worker idle beside them.
	$(BIN)/pytest -n $(or $(WORKERS),2) --dist loadfile --no-loadscope-reorder
	@if [ -e .venv/with-obstore ]; then $(MAKE) --no-print-directory test-obstore; fi

simulate: venv ## one run of the whole system on virtual time, with its trace: make simulate SEED=7
	$(BIN)/python -m tests.simulation.run --seed $(or $(SEED),1)

.PHONY: simulate-ci
simulate-ci: venv ## the simulation's tests, on other seeds than always: make simulate-ci SEED=1000
	SIMULATION_SEED=$(or $(SEED),0) $(BIN)/pytest tests/simulation -q

# LEDGER_SEEDS: histories of replicated ledgers. SEEDS: runs of the whole system, 100 ledgers each.
soak: venv ## many runs, fresh seeds: make soak LEDGER_SEEDS=5000 SEEDS=200 FROM=1 STATES=20000
	$(BIN)/python -m tests.crash_states.run --damages --states $(or $(STATES),20000) \
	  --seed $(or $(FROM),$(shell date +%s))
	$(BIN)/python -m tests.simulation.run --progress --seeds $(or $(SEEDS),50) \
	  --seed $(or $(FROM),$(shell date +%s))
	$(BIN)/python -m tests.simulation.run --progress --losses --ledgers 20 \
	  --seeds $(or $(LEDGER_SEEDS),2000) --seed $(or $(FROM),$(shell date +%s))
	$(BIN)/python -m tests.simulation.run --progress --losses --ledgers 200 \
	  --seeds $(or $(SEEDS),50) --seed $(or $(FROM),$(shell date +%s))

histories: venv ## real nodes under faults, logs and attributes judged by porcupine: HISTORIES=6 SECONDS=60 SEED=7
	$(BIN)/python -m tools.setup_go
	$(BIN)/python -m tests.histories.run --nodes $(or $(NODES),3 5) --seeds $(or $(HISTORIES),4) \
	  --seconds $(or $(SECONDS),60) --seed $(or $(SEED),$(shell date +%s))

.PHONY: exactly-once
exactly-once: venv ## eight producers, three nodes, kills: make exactly-once RUNS=100 SEED=7 (20 s a run)
	$(BIN)/python -m tests.exactly_once.run --runs $(or $(RUNS),100) --seed $(or $(SEED),$(shell date +%s))

.PHONY: test-interop
test-interop: venv ## both ways with Apache Pulsar's own offloader (50 MB, fetched once): SEED=7
	@$(BIN)/python -m tests.interop.program
	@seed=$(or $(SEED),$(shell date +%s)); echo "make test-interop SEED=$$seed"; \
	  INTEROP_SEED=$$seed $(BIN)/pytest -v tests/interop/both_ways.py

.PHONY: faults
faults: venv ## a trouble at every request of offload, delete, trim and scrub: make faults LANES=6 SEED=7 STOPS=0.1 WIPES=0.02
	TIERLOG_FAULTS_SHARE=1 $(BIN)/pytest -q tests/faults/test_every_call.py
	$(BIN)/python -m tests.faults.run --lanes $(or $(LANES),6) --seed $(or $(SEED),1) --stops $(or $(STOPS),0.1) \
	  --wipes $(or $(WIPES),0.02)

.PHONY: test-upgrade
test-upgrade: venv ## a rolling upgrade from another commit and back, under load: make test-upgrade FROM=v0.1.0
	$(BIN)/python -m tests.upgrade.run --from $(or $(FROM),HEAD~20)

test-compose: venv ## docker-compose.yml itself: build, start, append, offload, read back (needs Docker)
	@$(BIN)/python -m tools.run_compose

test-kube: deploy-tools ## install, upgrade and uninstall the chart on a real API server (needs Go; 10 min once)
	@$(BIN)/python -m tools.setup_go
	@$(BIN)/python -m tests.deployment.kube_api.run

demo: venv ## the main job, end to end, on this machine
	$(BIN)/tierlog demo

.PHONY: demo-cluster
demo-cluster: venv ## three nodes: one is lost for good, one comes back, in the end no copy lacks
	$(BIN)/tierlog demo --nodes 3 --kill-node

.PHONY: compiled
compiled: venv ## compile the reader's streaming cache, where a C compiler is (it runs without one too)
	@$(BIN)/python -m tools.compile_cache

.PHONY: test-obstore
test-obstore: venv ## reads by obstore (the extra tierlog[obstore]), through the object store's contract; then `make test` does it too
	@$(BIN)/python -m tools.setup_obstore
	.venv/with-obstore/bin/python -m pytest tests/interop/obstore_reads.py -q

spec: venv ## the model of the protocol: its whole state spaces, and every mistake it must find
	$(BIN)/python -m tests.spec.run

coverage: venv ## how many rows of the checklist are shown by tests
	$(BIN)/python tools/coverage_map.py

deploy-files: venv ## generate the chart's schema, alerts and dashboards from the code
	$(BIN)/python -m tools.deploy_files

deploy-tools: venv ## what tests of deploy/ need: helm, hadolint, schemas of Kubernetes
	@$(BIN)/python -m tools.setup_deploy

test-deploy: deploy-tools ## Dockerfiles, compose file, chart over 60 values files, alerts, dashboards
	$(BIN)/pytest -q tests/deployment

reference: venv ## generate docs/reference (formats, settings, errors, commands) from the code
	$(BIN)/python -m tools.generate_reference

bench: venv ## the benchmarks, each printing its ratios (BENCH=--quick: in a minute each; ONLY=cache: one)
	@$(BIN)/python -m tools.compile_cache --if-possible
	@for b in benchmarks/bench_$(or $(ONLY),*).py; do echo "== $$b"; $(BIN)/python "$$b" $(BENCH) || exit 1; done

lock: venv ## write the hashed locks anew from requirements*.in and the rooms
	$(BIN)/python tools/lock.py

clean: ## remove what the targets made
	rm -rf .venv .venv.lock .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -f services/reader/tierlog_reader/cache/blocks_compiled.*
