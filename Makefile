# `make demo` shows the product, `make test` proves it; both set up what they need.
.PHONY: setup demo test check lint completions bench campaign clean
.DEFAULT_GOAL := test
PYTHON := .venv/main/bin/python
JOBS ?= 4

setup:
	@.ci/setup

demo:
	@.ci/setup demo
	@PATH="$(CURDIR)/.venv/main/bin:$$PATH" bash tests/demo.sh

# In memory where there is room: what the tests wait for is then lionwt, not a disk.
test: setup
	@room=$$(mktemp -d "$$([ -w /dev/shm ] && echo /dev/shm || echo "$${TMPDIR:-/tmp}")/lionwt-tests.XXXXXX"); \
	trap 'rm -rf "$$room"' EXIT; \
	for version in 3.10 3.12 3.13; do \
	    [ ! -x .venv/$$version/bin/python ] || { echo "turn driver on CPython $$version"; \
	    .venv/$$version/bin/python -m pytest -q -n 2 -p no:cacheprovider --basetemp "$$room/$$version" tests/turn || exit 1; }; \
	done; \
	$(PYTHON) -m pytest -q -n $(JOBS) --dist worksteal --basetemp "$$room/main"

lint: setup
	@$(PYTHON) -m ruff check lionwt tests
	@$(PYTHON) -m ruff format --check lionwt tests
	@$(PYTHON) -m mypy

check: lint test

completions: setup
	@$(PYTHON) -m lionwt.completion completions

bench: setup
	@$(PYTHON) -m tests.bench

# Every crash, for an hour; what breaks is printed with what runs it again.
MINUTES ?= 60
campaign: setup
	@$(PYTHON) -m tests.crash --minutes $(MINUTES)

clean:
	@rm -rf .venv .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis dist build
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
