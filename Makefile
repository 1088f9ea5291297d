# Each target makes .venv, installs the extras it needs, and does its job.
# The stamps inside .venv make the second run quick; deleting .venv deletes them too.

PYTHON ?= $(shell for python in python3.11 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
BIN := .venv/bin
STAMPS := .venv/.stamps

.DELETE_ON_ERROR:

.PHONY: help demo test fuzz test-scale bucket-kills lint docs tables clean chromium azurite pins torture torture-explorer

# For what npm installs.
export PATH := $(CURDIR)/.venv/npm/node_modules/.bin:$(PATH)

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*  ## /make \1\t/p' $(MAKEFILE_LIST)

demo: $(STAMPS)/demo,explore  ## train on MNIST with recording, verify the memory, explain three test images
	$(BIN)/spotlights demo

# The mathematics is tested with every annotated shape and type checked at every call, which takes three times as long.
SHAPES := --jaxtyping-packages=spotlights,beartype.beartype
SHAPED := $(addprefix tests/inside/test_,$(addsuffix .py,backward dual_form layer_adapters memory_format reducers storage \
	sweep update_rules)) $(addprefix tests/test_,$(addsuffix .py,recording linear_layers recorded_layers no_slots \
	attend attention contributions influence passages folding))
# Three processes with one thread each: small networks gain nothing from threads, and a third of the time goes by in
# waiting for disks, browsers and other processes. Each file is one process's work, in the order of tests/conftest.py.
RUN := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder
test: $(STAMPS)/test chromium azurite  ## run the tests
	$(RUN) $(addprefix --ignore=,$(SHAPED))
	$(RUN) $(SHAPES) $(SHAPED)

# Each round draws other examples for the tests of "for all" claims; a failure prints how to get it back.
ROUNDS ?= 10
fuzz: $(STAMPS)/test  ## let hypothesis explore, for ROUNDS=10 rounds
	for round in $$(seq $(ROUNDS)); do HYPOTHESIS_PROFILE=explore OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest -q -n 2 --dist loadfile -m hypothesis || exit 1; done

# The browser tests use the system's Chromium; where it cannot be installed they are skipped, and say so.
chromium:
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	root=$$([ "$$(id -u)" = 0 ] || echo "sudo -n"); \
	{ $$root apt-get -q update && $$root apt-get -qy install --no-install-recommends chromium; } \
		|| echo "No Chromium: the tests of the explorer's page will be skipped." >&2

# The Azure server comes from npm; where it cannot be installed its tests are skipped, and say so.
azurite: $(STAMPS)/venv
	@command -v azurite-blob >/dev/null || npm install --silent --no-audit --no-fund --prefix .venv/npm azurite@3.35.0 \
		|| echo "No azurite: the tests of memories in Azure will be skipped." >&2

# Ray is not among the packages that the other checks install.
SCALE := $(addprefix tests/,inside/test_buckets.py inside/test_stores.py inside/test_ray_engine.py test_bucket_commands.py \
	test_copying.py test_parts.py test_ray.py test_processes.py test_sharded_training.py)
test-scale: $(STAMPS)/test,ray azurite  ## the tests of buckets, job arrays, Ray and fully_shard, with Ray installed
	$(RUN) $(SCALE)

bucket-kills: $(STAMPS)/test  ## kill -9 a process that records to a bucket, 100 times
	SPOTLIGHTS_BUCKET_KILLS=100 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s -k killed tests/inside/test_buckets.py

tables: $(STAMPS)/demo  ## write the pages and tables that are made from the code
	$(BIN)/python docs/cli_reference.py
	OMP_NUM_THREADS=1 $(BIN)/python docs/exactness.py

# The tutorials are run while the site is built. A broken link or reference is a warning, and a warning is an error.
docs: $(STAMPS)/docs  ## build the documentation site in docs/_build
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -b html -n -W --keep-going -q -d docs/_build/.doctrees docs docs/_build/html
	@echo "The site is at docs/_build/html/index.html."

lint: $(STAMPS)/demo,explore,lint  ## style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

# Memories under attack: kill -9, damaged and forged files, failing disks, forks. The numbers are in docs/security.md.
KILLS ?= 1000
CORRUPTIONS ?= 10000
torture: $(STAMPS)/test  ## kill recorders, damage memories, KILLS=1000 CORRUPTIONS=10000
	OMP_NUM_THREADS=1 $(BIN)/python tests/torture.py --kills $(KILLS) --corruptions $(CORRUPTIONS) --disks 100 --forks 100

# The explorer under attack and under load; other memories of this machine are not touched, and it ends by itself.
REQUESTS ?= 10000
USERS ?= 8
MINUTES ?= 10
torture-explorer: $(STAMPS)/test  ## hostile requests and users, REQUESTS=10000 USERS=8 MINUTES=10
	OMP_NUM_THREADS=1 $(BIN)/python tests/hostile_requests.py --requests $(REQUESTS) --users $(USERS) --minutes $(MINUTES)

# The newest releases that pyproject.toml allows, with torch as it is; `editables` is what a build of `-e` takes.
# constraints.txt has versions alone. Run `make lint docs test` before committing what came out.
pins:  ## renew constraints.txt in a fresh environment, build/pins
	rm -rf build/pins && "$(PYTHON)" -m venv build/pins && grep '^torch==' constraints.txt > build/pins/torch.txt
	PIP_CONSTRAINT=build/pins/torch.txt build/pins/bin/pip install --disable-pip-version-check -e '.[dev]' editables
	build/pins/bin/pip check
	build/pins/bin/pip freeze --all --exclude-editable | grep -v '^pip==' | sed 's/+[a-z0-9.]*$$//' > constraints.txt

clean:  ## delete .venv and what the tools leave behind
	rm -rf .venv build dist docs/_build .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMPS)/venv:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "Spotlights needs Python 3.11 or newer, and '$(PYTHON)' is not." >&2; \
		echo "Name one that is: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	"$(PYTHON)" -m venv .venv
	@mkdir -p $(STAMPS) && touch $@

# A stamp's name is the list of extras that it stands for. As a variable, the constraints hold for the build's own
# environment too.
$(STAMPS)/%: $(STAMPS)/venv pyproject.toml constraints.txt
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --disable-pip-version-check -e '.[$*]'
	@touch $@
