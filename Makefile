# `make lab` opens the quickstart and `make quick` runs the quick tests; each first sets up what it
# needs. CONTRIBUTING.md says what `make quick`, `make test` and `make test-all` run.

PYTHON ?= python3
ARGS ?=
DEVICE ?=
# draws the sample of tests: another for each commit, the same for the same one
SEED ?= $(shell git rev-parse --short HEAD 2>/dev/null)

VENV := .venv
BIN := $(VENV)/bin
# twice quiet: errors only
INSTALL := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt
SET_UP := $(VENV)/created
REQUIRED := pyproject.toml constraints.txt $(SET_UP)
TESTED := optimizers,fp8,deepspeed,sweep,test,browser
DEVELOPED := $(TESTED),dev
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)
NUMBERS := $(sort $(foreach file,$(wildcard notebooks/*.ipynb),$(firstword $(subst _, ,$(notdir $(file))))))
SECOND_HALF := $(foreach number,$(NUMBERS),$(if $(filter %1 %3 %5 %7 %9,$(number)),$(number)))
EXTRA_KEYS := metadata.papermill cell.metadata.papermill metadata.language_info.version
# the server listens on loopback only; its root user must be allowed by name
AS_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

# the page's JavaScript: a person may have no node, CI has
define LINT_PAGE
if command -v npm >/dev/null; then \
	cd tests/page && \
	{ [ node_modules/.package-lock.json -nt package-lock.json ] || npm ci --silent; } && \
	npm run --silent types && npm run --silent prettier -- --check; \
elif [ -n "$$CI" ] || [ "$$MEMLAB_REQUIRE_BROWSER" = 1 ]; then \
	echo "make lint checks JavaScript with node and npm, which are not on this system."; exit 1; \
else \
	echo "JavaScript was not checked: node and npm are not on this system."; \
fi
endef

.PHONY: lab quick test test-all test-deps notebooks course lint bench docs docs-links picture clean
.NOTPARALLEL:

# warnings only, so that the address is not lost among the lines of a starting server
lab: $(VENV)/lab
	@echo "starting JupyterLab: notebooks/00_quickstart.ipynb opens in your browser in a few seconds"
	@echo "If no browser opens, open the address that JupyterLab prints below. Control-C ends it."
	@$(BIN)/jupyter lab --ServerApp.log_level=WARN --LabApp.log_level=WARN --ip=127.0.0.1 --ServerApp.root_dir=. \
		--LabApp.default_url=/lab/tree/notebooks/00_quickstart.ipynb $(AS_ROOT) $(ARGS)

# two files at a time; threads that wait for work would else keep the cores from one another
PYTEST := OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n 2 --dist loadfile \
	--no-loadscope-reorder --durations=30

quick: $(VENV)/test
	$(PYTEST) -m "not slow" --sample=0.05 --seed=$(SEED) $(ARGS) \
		tests/pure tests/step tests/matrix/test_combinations.py

test: $(VENV)/test
	$(PYTEST) --sample=0.05 --seed=$(SEED) $(ARGS)

test-all: $(VENV)/test
	$(PYTEST) $(ARGS)

# the browser itself; the package that drives it comes with `make test`
test-deps: $(VENV)/test
	@for browser in $$MEMLAB_CHROMIUM chromium chromium-browser google-chrome; do \
		command -v $$browser && exit 0; \
	done; \
	if command -v apt-get >/dev/null; then \
		$(SUDO) apt-get update -qq && \
		$(SUDO) apt-get install -y -qq --no-install-recommends chromium fonts-liberation; \
	else \
		echo "make test-deps installs Chromium through apt-get, which is not on this system."; \
		echo "Install Chromium or Chrome your own way, then run MEMLAB_CHROMIUM=/path/to/it make test"; \
		exit 1; \
	fi

notebooks: $(VENV)/lab
	@$(BIN)/python notebooks/run.py $(if $(DEVICE),--device $(DEVICE))

# every notebook as somebody has them who installs the wheel with this extra alone, outside of the
# clone; two at a time, for each keeps one processor busy
course: $(VENV)/lab
	@folder=$$(mktemp -d) && trap 'rm -rf $$folder' EXIT && \
	$(BIN)/python -m pip wheel --quiet --quiet --no-deps --wheel-dir $$folder . && \
	$(BIN)/python -m venv $$folder/venv && \
	$$folder/venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
		-c constraints.txt torch "$$(echo $$folder/*.whl)[course]" && \
	cd $$folder && run="venv/bin/memlab notebooks --run --device cpu --quick --out out" && \
	{ $$run $(filter-out $(SECOND_HALF),$(NUMBERS)) --copy one & one=$$!; \
	  $$run $(SECOND_HALF) --copy two; two=$$?; wait $$one && exit $$two; }

lint: $(VENV)/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/nbstripout --verify --keep-id --extra-keys "$(EXTRA_KEYS)" $(wildcard notebooks/*.ipynb)
	@$(LINT_PAGE)

bench: $(VENV)/lab
	@for file in $$(grep -ls '__main__' benchmarks/*.py); do \
		echo "== $$file"; $(BIN)/python "$$file" || exit 1; \
	done

SITE := build/site
SPHINX = $(BIN)/python -m sphinx -q -W --keep-going -n -c docs -d $(SITE)/doctrees $(SITE)/source

docs: $(VENV)/docs
	@$(BIN)/python docs/pages.py $(SITE)/source
	@$(SPHINX) $(SITE)/html
	@echo "the site is $(SITE)/html/index.html"

# of links to other sites; a link inside of the site that leads nowhere fails `make docs`
docs-links: docs
	@$(SPHINX) -b linkcheck $(SITE)/links

# the moving picture in README.md
picture: $(VENV)/test
	$(BIN)/python -m benchmarks.moving_picture docs/red_to_green.gif

clean:
	rm -rf $(VENV) build dist ui-out .pytest_cache .ruff_cache .mypy_cache .hypothesis \
		tests/page/node_modules
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One line for each stage of a set-up: what it does, a dot every five seconds while it goes on, and
# the time that it took. $(call stage,text,command): without a comma in either.
define stage
@begin=$$(date +%s); printf '%s ...' "$(1)"; \
	(while sleep 5 >/dev/null 2>&1; do printf .; done) & dots=$$!; \
	trap 'kill $$dots' EXIT; trap 'exit 130' INT TERM; \
	$(2) || { echo " failed"; exit 1; }; \
	echo " $$(($$(date +%s) - begin)) s"
endef

# stamps: a set-up is done again only when what it was made from has changed; a larger one counts
# for the smaller ones

$(SET_UP):
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || { \
		echo "memlab needs Python 3.11 to 3.14, and $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
			"run: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@echo "The first set-up takes 2 to 10 minutes. It downloads about 0.5 GB; on Linux about 3 GB," \
		"because PyTorch brings CUDA's libraries there. All of it goes into $(VENV)."
	$(call stage,creating $(VENV),$(PYTHON) -m venv $(VENV))
	$(call stage,installing PyTorch (the largest part),$(INSTALL) torch)
	@touch $@

$(VENV)/lab: $(REQUIRED)
	$(call stage,installing memlab with JupyterLab and what its notebooks need,$(INSTALL) -e '.[course]')
	@touch $@

$(VENV)/test: $(REQUIRED)
	$(call stage,installing memlab and what its tests need,$(INSTALL) -e '.[$(TESTED)]')
	@touch $(VENV)/lab $@

$(VENV)/docs: $(REQUIRED)
	$(call stage,installing memlab and what its site is built with,$(INSTALL) -e '.[docs]')
	@touch $@

$(VENV)/lint: $(REQUIRED)
	$(call stage,installing memlab and its development tools,$(INSTALL) -e '.[$(DEVELOPED)]')
	@touch $(VENV)/lab $(VENV)/test $@
