# On a fresh machine with Python 3.11+: `make demo`, `make test`. PYTHON=python3.12 chooses another.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check
FLIGHTS ?=
SOAK_SECONDS ?= 600
RELAY ?= at_least_once
CONSUMER ?= idempotent
LOAD ?=
SEED ?=
CLUSTER ?=
FAULT ?=
OPTIONS ?=
PORT ?=
SCOPES ?=
AREA ?=
SAMPLE ?=
MUTANT ?=
MODEL_SECONDS ?= 300
# More than cores, since many tests wait. Each has servers of its own for the tests that kill them: some 1.5 GB.
WORKERS ?= 5
TESTS ?=
CELLS ?=
# What starts whole installations, browsers and servers of its own, or explores all states of a model.
SYSTEM := $(addprefix tests/,browser demo deploy fleet history local model)

# A suite starts a thousand processes: none should compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: hello demo demo-archive ui fleet test test-system test-all collect test-fast coverage matrix interop chart model mutants soak thorough lint docs golden bench release release-dump clean
.DELETE_ON_ERROR:

hello: $(VENV)/ready
	@PATH="$(CURDIR)/$(BIN):$$PATH" outbox local run -- sh -c 'outbox migrate && python examples/hello.py'

demo: $(VENV)/ready
	@$(BIN)/python -m examples.airline $(if $(FLIGHTS),--flights $(FLIGHTS))

demo-archive: $(VENV)/ready
	@$(BIN)/python -m examples.airline archive

ui: $(VENV)/ready
	@$(BIN)/python -m examples.airline ui $(if $(PORT),--port $(PORT))

fleet: $(VENV)/ready
	@$(BIN)/python -m examples.airline fleet $(if $(PORT),--port $(PORT))

# Each guarantee once; all of TESTS.
test: $(VENV)/ready
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=10 $(or $(TESTS),--short $(addprefix --ignore=,$(SYSTEM)))

# The other part of the suite: the demo, Dagster's pages in a browser, histories of faults, models.
test-system: $(VENV)/ready
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=10 $(SYSTEM)

# Everything but `make thorough` and `make interop`, in one run, which starts the servers once.
test-all: $(VENV)/ready
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=10

# Compiles each test once: before a run it saves every process of the suite the same work.
collect: $(VENV)/ready
	@found=$$($(BIN)/python -m pytest --collect-only -qq 2>&1) || { echo "$$found"; exit 1; }

# The tests that start no server, in less than a minute.
test-fast: $(VENV)/ready
	$(BIN)/python -m pytest -n 2 --dist loadfile --fast

# Which branches of the package the suite, or TESTS alone, goes through: a table, and the least covered files.
coverage: $(VENV)/ready
	@$(BIN)/python -m tests.coverage -n $(WORKERS) --dist worksteal $(TESTS)

# A part of the suite with each Python 3.11 to 3.14 and PostgreSQL 14 to 18 that is installed, or in CELLS alone.
matrix: $(VENV)/ready
	@$(BIN)/python -m tests.matrix $(CELLS)

# Dapr's real sidecar and the second judge of histories, which are built from their Go modules once; handlers in
# Java and Node; readers of Iceberg, in environments of their own. All of them and a network are needed.
interop: $(VENV)/ready
	@$(BIN)/python -m tests.interop.build
	$(BIN)/python -m pytest --durations=5 tests/interop

# The manifests for kubectl, of the Helm chart.
chart: $(VENV)/ready
	@$(BIN)/python -m tests.interop.chart

model: $(VENV)/ready
	@$(BIN)/python -m tests.model $(SCOPES) --seconds $(MODEL_SECONDS) --processes 2
	@$(if $(SCOPES),,$(BIN)/python -m tests.model --breaks)

# Conditions in SQL, and settings, each turned around once: which of them no test finds.
mutants: $(VENV)/ready
	@$(BIN)/python -m tests.mutants $(AREA) $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(SEED),--seed $(SEED)) $(if $(MUTANT),--mutant $(MUTANT)) --show

soak: $(VENV)/ready
	@$(BIN)/python -m tests.history run --seconds $(SOAK_SECONDS) --relay $(RELAY) --consumer $(CONSUMER) $(if $(LOAD),--load $(LOAD)) $(if $(SEED),--seed $(SEED)) $(if $(CLUSTER),--brokers $(CLUSTER)) $(if $(FAULT),--fault "$(FAULT)") $(OPTIONS)

# What make test does in part: each kill, cycle, fault and case of the tests that are marked as thorough.
thorough: $(VENV)/ready
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations=10 --thorough -m thorough

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The pages as a site, from build/docs/index.html; a broken link or anchor fails it.
docs: $(VENV)/ready
	@$(BIN)/python -m benchmarks.page
	@rm -rf build/docs build/doctrees
	@$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --nitpicky --jobs 2 -d build/doctrees docs build/docs
	@echo build/docs/index.html

# What users build on, as it is now: only if a change of it is meant, and named in CHANGELOG.md.
golden: $(VENV)/ready
	@$(BIN)/python -m tests.golden

# All parts or those of BENCH, into benchmarks/results.json; QUICK=1: small sizes, ratios only, nothing is kept.
bench: $(VENV)/ready
	@$(BIN)/python -m benchmarks $(BENCH)

# The installation of this version for tests/releases, until it is released: then it is never made again.
release-dump: $(VENV)/ready
	@$(BIN)/python -m tests.releases

# Makes dist/ from what is committed and checks it: files, page, that it can be made again, and works alone.
release: $(VENV)/ready
	@$(BIN)/python -m tests.release

clean:
	rm -rf $(VENV)

$(VENV)/ready: locks/uv.txt locks/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 …")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --require-hashes -r locks/uv.txt
# It takes a ninth of pip's time, but reads none of pip's settings: where it finds no package, pip may.
	$(BIN)/uv pip install --python $(BIN)/python --quiet --require-hashes -r locks/dev.txt || $(PIP) --require-hashes -r locks/dev.txt
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@
