PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable

# torch's threads spin while they wait for each other: on cores that others use too, that is many times as slow.
export GOMP_SPINCOUNT ?= 1000

.PHONY: quickstart test lint clean

quickstart: .venv/quickstart-ready  # a real encoder and real text: train, evaluate before and after, save, load
	$(BIN)/python -m quickstart $(if $(OBJECTIVE),--objective $(OBJECTIVE))

test: .venv/dev-ready
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: .venv/dev-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.venv/quickstart-ready: setup.py constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) ".[quickstart]"
	touch $@

.venv/dev-ready: setup.py constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) ".[dev]"
	touch $@

clean:
	rm -rf .venv build dist *.egg-info
