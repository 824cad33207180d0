# What can be done with this checkout; `make` alone lists it. Everything is installed into .venv by tools/setup.sh.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help demo quick test test-kernels guest-kernel torture mutants lint bench docs site clean

# Many containers forbid to write byte code; each run would then rewrite the assertions of all test files again.
unexport PYTHONDONTWRITEBYTECODE

PYTHON := .venv/bin/python
SOURCES := $(shell find src -name '*.py')
MKDOCS := NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs
# Tests of real programs wait for a third of their time: three workers keep two processors busy.
WORKERS := 3
TESTS := $(PYTHON) -m pytest -q --timeout=600 --timeout-method=signal
# The tests of a file run one after the other: they share what they build, and the names they probe.
PARALLEL := $(TESTS) -n $(WORKERS) --dist loadfile

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/run.stamp ## install what is needed and show probe records of a real program
	@sh tools/demo.sh

quick: .venv/dev.stamp ## run the tests that take no time: unit tests and cases
	$(TESTS) -n 2 --dist loadfile -m "not torture and not slow" tests/unit tests/cases

test: .venv/dev.stamp .venv/site.stamp .venv/tools.stamp ## run the whole test suite
	$(PYTHON) -m compileall -q src
	@sh tools/test.sh $(PYTHON) $(WORKERS)

test-kernels: .venv/dev.stamp .venv/tools.stamp ## run the tests that other kernels are booted for, each on all of them
	$(PYTHON) -m compileall -q src
	$(PARALLEL) --all-kernels -m "not torture" tests/kernel

guest-kernel: .venv/dev.stamp ## build the kernel of guests that lets functions be skipped, which some tests need
	$(PYTHON) tools/build_guest_kernel.py

torture: export DPROBES_TEST_START := exec
torture: .venv/dev.stamp .venv/tools.stamp .venv/selftests.stamp ## run the long forms of the torture and differential tests
	$(PYTHON) -m pytest -q --all-kernels -m torture
	$(TESTS) --all-kernels -m "not torture" tests/kernel
	DPROBES_EXAMPLES=torture $(PYTHON) -m pytest -q tests/unit tests/integration/ebpf/test_random_uprobes.py tests/integration/test_random_handlers.py

mutants: .venv/dev.stamp ## change single places of the sources, and list the changes that no test notices
	$(PYTHON) tools/mutants.py --count 200

lint: .venv/dev.stamp .venv/site.stamp ## check style, types, layers, links of the documentation, and that generated files are up to date
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	$(PYTHON) tools/module_graph.py
	$(PYTHON) tools/word_lint.py
	$(PYTHON) tools/docstring_lint.py
	$(PYTHON) tools/match_lint.py
	$(PYTHON) tools/generate_docs.py --check
	$(PYTHON) tools/generate_man.py --check
	$(PYTHON) tools/generate_builder.py --check
	$(PYTHON) tools/generate_syntax.py --check
	$(MKDOCS) build --strict --site-dir .cache/site

bench: .venv/dev.stamp .venv/tools.stamp .venv/bench.stamp ## measure costs beside those of the peers, in one table
	$(PYTHON) benchmarks/run.py

docs: .venv/dev.stamp ## write what is generated from tables: parts of the documentation and of the Python API
	$(PYTHON) tools/generate_docs.py
	$(PYTHON) tools/generate_man.py
	$(PYTHON) tools/generate_builder.py
	$(PYTHON) tools/generate_syntax.py

site: .venv/dev.stamp .venv/tools.stamp .venv/site.stamp ## build the documentation as a web site, in site/
	$(PYTHON) tools/site_pictures.py .cache/pictures
	$(MKDOCS) build --strict
	@echo "open site/index.html"

clean: ## remove everything that can be made again
	rm -rf .venv site .cache/site .cache/pictures .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

.venv/run.stamp: pyproject.toml tools/setup.sh
	@sh tools/setup.sh run

.venv/dev.stamp: pyproject.toml tools/setup.sh
	@sh tools/setup.sh dev

.venv/tools.stamp: .venv/dev.stamp tools/setup.sh
	@sh tools/setup.sh tools

.venv/site.stamp: .venv/dev.stamp pyproject.toml tools/setup.sh
	@sh tools/setup.sh site

.venv/selftests.stamp: .venv/tools.stamp tools/setup.sh
	@sh tools/setup.sh selftests

.venv/bench.stamp: .venv/dev.stamp pyproject.toml tools/setup.sh
	@sh tools/setup.sh bench
