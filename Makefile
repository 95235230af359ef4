# Everything a contributor runs. A fresh clone needs Python 3.11 or newer, make and a shell;
# the rest comes from PyPI into .venv, by whatever pip settings the machine already has.

# `make test PYTHON=python3.12` uses that interpreter, in an environment of its own.
PYTHONS := $(or $(PYTHON),python3.13 python3.12 python3.11 python3)
VENV    := .venv$(if $(PYTHON),-$(notdir $(PYTHON)))
PY      := $(VENV)/bin/python
# `make test LOCKED=1` installs the versions of requirements-dev.lock.
LOCK    := $(if $(LOCKED),--constraint requirements-dev.lock)
# Tests spend a third of their time waiting for processes and disks: two more workers than cores keep the cores busy.
WORKERS := $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 2)))
PYTEST  := $(PY) -m pytest -n $(WORKERS) --dist worksteal

# Tests start many processes, and each would compile the whole package again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Two pips at once in one environment would trip over each other.
.NOTPARALLEL:
.PHONY: help demo environment test test-rest test-all test-far test-neighbours lint-neighbours soak simulate bench docs lint clean programs

help:  ## print these lines
	@awk -F ':.*## *' '/^[a-z-]+:.*## / {printf "make %-15s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/has-package  ## watch an agent die at step 6 and resume
	@$(PY) -m killick demo

environment: $(VENV)/has-test $(VENV)/has-lint $(VENV)/has-neighbours $(VENV)/has-docs  ## install what .ci/run needs

test: $(VENV)/has-test  ## run the gate, in under five minutes: every test but those marked slow or far
	@$(PYTEST)

test-rest: $(VENV)/has-test programs  ## run the tests marked slow: more kills, every case and page, browsers, servers
	@$(PYTEST) -m 'slow and not far'

test-all: $(VENV)/has-test programs  ## run every test but those marked far
	@$(PYTEST) -m 'not far'

test-far: $(VENV)/has-test $(VENV)/has-far programs  ## hunt for hours, by hand: tests marked far, more escapes and attacks, soak, clusters
	@$(PYTEST) -m far
	@PYTHONPATH=tests $(PY) -m escape --times 20
	@PYTHONPATH=tests $(PY) -m attack
	@$(MAKE) soak STORY_SECONDS=$(or $(STORY_SECONDS),3600)
	@$(MAKE) simulate SECONDS=$(or $(SECONDS),3600) FIRST=$(or $(FIRST),100000)

# Slow tests use a real browser and PgBouncer. Root on Debian gets them installed here; elsewhere the tests say how.
programs: build/axe.min.js
	@missing=; command -v chromium >/dev/null || missing=chromium; \
	PATH=$$PATH:/usr/sbin command -v pgbouncer >/dev/null || missing="$$missing pgbouncer"; \
	if [ -n "$$missing" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing $$missing"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$missing >/dev/null || true; \
	fi

test-neighbours: $(VENV)/has-neighbours  ## try Killick in real frameworks, stores and engines, each in its own environment
	@$(PY) tests/neighbours/__main__.py $(NEIGHBOURS)

lint-neighbours: $(VENV)/has-neighbours  ## check the types of adapters and engines, each beside its own package
	@$(PY) tests/neighbours/__main__.py --types $(NEIGHBOURS)

soak: $(VENV)/has-test  ## kill and freeze workers, tell random stories (STORY_SECONDS=600), then run every random test with a new seed
	@PYTHONPATH=tests $(PY) -m soak
	@PYTHONPATH=tests $(PY) -m soak.stories --limit-seconds $(or $(STORY_SECONDS),600)
	@KILLICK_SEED=random $(PYTEST) -m 'not far'

simulate: $(VENV)/has-test  ## simulate clusters in virtual time for a minute (SECONDS=600), or one of them again (SEED=17)
	@PYTHONPATH=tests $(PY) -m cluster $(if $(SEED),$(SEED),--seconds $(or $(SECONDS),60) --first $(or $(FIRST),0)) $(SIMULATE)

bench: $(VENV)/has-bench  ## measure, side by side with raw stores and peers, in one run
	@$(PY) -m bench

docs: $(VENV)/has-docs build/mermaid.min.js  ## build the documentation site in build/site; a warning is an error
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet
	@echo "built build/site/index.html"

# Drawings are made in the reader's browser, by a script that the site serves itself.
build/mermaid.min.js: | $(VENV)/has-docs
	@mkdir -p build && cd build && ../$(VENV)/bin/npm pack --silent mermaid@11 >/dev/null \
	  && tar xzf mermaid-11*.tgz --strip-components=2 package/dist/mermaid.min.js && rm mermaid-11*.tgz && touch mermaid.min.js

# The accessibility checks of the browser tests.
build/axe.min.js: | $(VENV)/has-docs
	@mkdir -p build && cd build && ../$(VENV)/bin/npm pack --silent axe-core@4 >/dev/null \
	  && tar xzf axe-core-4*.tgz --strip-components=1 package/axe.min.js && rm axe-core-4*.tgz && touch axe.min.js

# The test group is here too, because what src/killick/testing imports has to be found to be checked.
# pyright's own question to npm, whether it is the newest, is left out: nothing here needs the network. It runs beside
# the others, because it takes as long as all of them.
lint: $(VENV)/has-test $(VENV)/has-lint  ## check style, format and types
	@failed=0; output=$$(mktemp); \
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(PY) -m pyright --pythonpath $(PY) >"$$output" 2>&1 & pyright=$$!; \
	for check in 'ruff check .' 'ruff format --check .' 'mypy'; do \
	  echo "-- $$check"; \
	  $(PY) -m $$check || failed=1; \
	done; \
	wait $$pyright || failed=1; \
	echo "-- pyright"; cat "$$output"; rm "$$output"; \
	exit $$failed

clean:  ## remove everything that make made, .venv included
	rm -rf .venv .venv-* .neighbours .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist killick-demo
	find src tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment. Each has-… file is a stamp: it says what was installed after which pyproject.toml.

$(VENV)/has-package: $(VENV)/made pyproject.toml
	@echo "installing killick"
	@$(PY) -m pip install --quiet $(LOCK) --editable '.[web]'
	@touch $@

$(VENV)/has-%: $(VENV)/made pyproject.toml
	@echo "installing killick, with what '$*' needs"
	@$(PY) -m pip install --quiet $(LOCK) --editable . --group $*
	@touch $@

# An interpreter that is gone, or newer than the environment made from it, has it made again.
$(PY): ;

$(VENV)/made: $(PY)
	@without_venv=; \
	for python in $(PYTHONS); do \
	  "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	  if "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
	    echo "making $(VENV) with $$("$$python" --version)"; \
	    "$$python" -m venv --clear $(VENV) \
	      && $(PY) -m pip install --quiet --upgrade 'pip>=25.1' \
	      && touch $@; \
	    exit; \
	  fi; \
	  without_venv=$${without_venv:-$$("$$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')}; \
	done; \
	if [ -n "$$without_venv" ]; then \
	  echo "$$without_venv cannot make virtual environments; on Debian or Ubuntu: apt install $$without_venv-venv" >&2; \
	else \
	  echo "Killick needs Python 3.11 or newer, and none of $(PYTHONS) is; on Debian or Ubuntu: apt install python3 python3-venv" >&2; \
	fi; \
	exit 1
