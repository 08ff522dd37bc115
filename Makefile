# Everything a developer runs. Needs python3 and make; the rest is installed into .venv at first use.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check test-long test-spark-kills bench-engine bench-depth bench-queues bench-worker bench-opening bench-spark bench-processes bench-server clean
.DEFAULT_GOAL := test

demo: $(READY)
	@$(BIN)/python demo/run.py

test: check
	@$(BIN)/pytest -q -n 2

check: $(READY)
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet || { echo "some files are not formatted; run $(BIN)/ruff format"; exit 1; }
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/pytest -q tests/test_layering.py

test-long: check
	@$(BIN)/pytest -q -n 2 -m "" --seeds 20000

test-spark-kills: $(READY)
	@$(BIN)/python -m tests.spark.campaign --kills 50

bench-engine: $(READY)
	@$(BIN)/python benchmarks/engine.py

bench-depth: $(READY)
	@$(BIN)/python benchmarks/depth.py

bench-queues: $(READY)
	@$(BIN)/python benchmarks/queues.py

bench-worker: $(READY)
	@$(BIN)/python benchmarks/worker.py

bench-opening: $(READY)
	@$(BIN)/python benchmarks/opening.py

bench-spark: $(READY)
	@$(BIN)/python benchmarks/spark.py

bench-processes: $(READY)
	@$(BIN)/python benchmarks/processes.py

bench-server: $(READY)
	@$(BIN)/python benchmarks/server.py

# The stamp is written last, so an install that was interrupted is done again.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	@rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -prune -exec rm -rf {} +
