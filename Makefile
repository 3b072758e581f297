# make test: everything that must pass.  make demo: train a small model on 8 simulated devices.
# make setup PYTHON=/path/to/python3.12 chooses the Python; otherwise one is found.

PY := .venv/bin/python
# A worker that crashed ends the run and its test is named: pytest-xdist 3.8 waits for ever after replacing one.
PYTEST := -q -n 2 --dist loadfile --max-worker-restart 0
.PHONY: setup lint test demo clean
.NOTPARALLEL:

setup:
	@sh .ci/setup.sh

lint: setup
	@$(PY) -m ruff check --quiet .
	@$(PY) -m ruff format --quiet --check .
	@$(PY) -m mypy --no-error-summary

test: lint
	@$(PY) -m pytest $(PYTEST)

demo: setup
	@$(PY) experiments/pretrain_lm.py --simulate 8 --plan.mesh data=2,pipe=2,tensor=2 --plan.zero 1 --plan.microbatches 4

clean:
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	@find jaxpar models experiments tests -name __pycache__ -type d -prune -exec rm -rf {} +
