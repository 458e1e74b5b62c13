# The two commands of the README, and the checks behind them.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-long lint clean

demo: $(VENV)/ready
	$(BIN)/eeplan demo --out reports/demo

# One worker per core; a file's tests stay together, since they share the processes they start.
test: $(VENV)/ready lint
	$(BIN)/pytest -n 2 --dist loadfile

test-long: $(VENV)/ready
	$(BIN)/pytest -m 'long or not long' --hypothesis-profile fresh

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV) || { echo "make: needs $(PYTHON) with venv (Debian: apt install python3.11-venv)"; exit 1; }
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[runtime,serve,dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
