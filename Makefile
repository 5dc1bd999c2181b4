# Everything a fresh clone needs: `make demo` and `make test` set up .venv by themselves.
PYTHON ?= python3

VENV := .venv
LOWEST := .venv-lowest
BIN := $(VENV)/bin
PIP_INSTALL := -m pip --disable-pip-version-check install -qq
PYTEST := -m pytest -n 2 --dist loadfile

.PHONY: help demo test test-slow lint lowest clean

help:
	@echo "make demo       find, calibrate, rewrite and verify a fixture decoder"
	@echo "make test       all tests but the slow ones"
	@echo "make test-slow  the long property and packaging tests"
	@echo "make lint       ruff, pyright and the project's own limits"
	@echo "make lowest     the tests with the lowest versions that pyproject.toml allows"
	@echo "make clean      remove environments, caches and demo output"

demo: $(VENV)/.installed
	@$(BIN)/python tools/demo.py

test: $(VENV)/.installed
	$(BIN)/python $(PYTEST)

test-slow: $(VENV)/.installed
	$(BIN)/python $(PYTEST) -m slow

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python tools/check_limits.py

lowest: $(LOWEST)/.installed
	$(LOWEST)/bin/python $(PYTEST)

clean:
	rm -rf $(VENV) $(LOWEST) build dist demo-out *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are written last, so an interrupted installation is done again.
$(VENV)/.installed: pyproject.toml $(BIN)/python
	@echo "installing graphsurgery and its test tools into $(VENV)"
	@$(BIN)/python $(PIP_INSTALL) -e '.[test]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing the lint tools into $(VENV)"
	@$(BIN)/python $(PIP_INSTALL) -e '.[dev]'
	@touch $@

$(LOWEST)/.installed: pyproject.toml tools/lowest.py $(LOWEST)/bin/python
	@echo "installing the lowest versions into $(LOWEST)"
	@$(LOWEST)/bin/python tools/lowest.py --extra test > $(LOWEST)/constraints.txt
	@$(LOWEST)/bin/python $(PIP_INSTALL) -c $(LOWEST)/constraints.txt -e '.[test]'
	@touch $@

$(VENV)/bin/python $(LOWEST)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "graphsurgery needs Python 3.11 or newer, and $(PYTHON) is: $$($(PYTHON) --version 2>&1); name another one with make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(patsubst %/bin/python,%,$@)
