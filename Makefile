SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin

.PHONY: quickstart test lint clean

quickstart: .venv/ready  ## a real encoder, real parallel text, training, evaluation: about 8 minutes on 2 cores
	$(BIN)/python -m quickstart.run

test: .venv/ready  ## the test suite: under two minutes on 2 cores
	$(BIN)/python -m pytest -n 2

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.venv/ready: setup.py constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv build dist *.egg-info
