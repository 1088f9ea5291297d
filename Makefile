# Each target makes .venv, installs the extras it needs, and does its job.
# The stamps inside .venv make the second run quick; deleting .venv deletes them too.

PYTHON ?= $(shell for python in python3.11 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
BIN := .venv/bin
STAMPS := .venv/.stamps

.DELETE_ON_ERROR:

.PHONY: help demo test lint docs clean chromium

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*  ## /make \1\t/p' $(MAKEFILE_LIST)

demo: $(STAMPS)/demo,explore  ## train on MNIST with recording, verify the memory, explain three test images
	$(BIN)/spotlights demo

# Some of it once more with every annotated shape and type checked at every call, which takes three times as long.
SHAPES := --jaxtyping-packages=spotlights,beartype.beartype
SHAPED := $(addprefix tests/test_,$(addsuffix .py,recording linear_layers recorded_layers no_slots attend attention \
	scan contributions layer_adapters influence passages folding))
# Two processes with one thread each: small networks gain nothing from threads.
test: $(STAMPS)/test chromium  ## run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(SHAPES) $(SHAPED)

# The browser tests use the system's Chromium; where it cannot be installed they are skipped, and say so.
chromium:
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	root=$$([ "$$(id -u)" = 0 ] || echo "sudo -n"); \
	{ $$root apt-get -q update && $$root apt-get -qy install --no-install-recommends chromium; } \
		|| echo "No Chromium: the tests of the explorer's page will be skipped." >&2

docs: $(STAMPS)/demo  ## write the pages that are made from the code
	$(BIN)/python docs/cli_reference.py
	OMP_NUM_THREADS=1 $(BIN)/python docs/exactness.py

lint: $(STAMPS)/demo,explore,lint  ## style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

clean:  ## delete .venv and what the tools leave behind
	rm -rf .venv build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMPS)/venv:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "Spotlights needs Python 3.11 or newer, and '$(PYTHON)' is not." >&2; \
		echo "Name one that is: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	"$(PYTHON)" -m venv .venv
	@mkdir -p $(STAMPS) && touch $@

# A stamp's name is the list of extras that it stands for.
$(STAMPS)/%: $(STAMPS)/venv pyproject.toml constraints.txt
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@
