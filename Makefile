# `make` lists the commands.  Everything is installed into .venv, nothing outside this folder.
# Works with GNU make from 3.81 (macOS) on.

# The Python to use for a new .venv; empty: the first of these that fits.
PYTHON =
PYTHONS = python3 python3.14 python3.13 python3.12 python3.11 python3.10
# 1: torch without CUDA, from PyTorch's own index.
CPU =
# For `make measure`: the number of ranks, and options of the lab.
PROCESSES = 2
ARGS =
# For `make course` and `make labs`: which labs or notebooks to copy afresh ("lab2 03", all).
FRESH =
# For `make test`: the number of test processes, and options of pytest.  FAST=1: what an edit needs; ALL=1: everything.
WORKERS = 2
FAST =
ALL =
PYTEST_ARGS =

VENV = .venv
RUN = $(VENV)/bin/python
COURSE = $(VENV)/.course-installed
SITE_TOOLS = $(VENV)/.site-installed
TESTS = $(VENV)/.tests-installed
SOURCES = src labs tests .ci
# By day the chapters, at night also the notebook for borrowed GPUs.
NBVAL = --nbval --nbval-current-env --nbval-cell-timeout 600 $(if $(filter 1,$(ALL)),,--ignore=notebooks/free_gpus.ipynb)
# Settings of JupyterLab that a learner's own come on top of: no popup about news, no look for updates.
LAB_CONFIG = notebooks/jupyter
CPU_INDEX = https://download.pytorch.org/whl/cpu
CPU_INDEX_SECONDS = 30

.PHONY: help setup course labs lint test test-all gpus matrix tapes measure notebooks site clean

help: ## list these commands
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1@\2/p' Makefile | while IFS=@ read -r name text; do printf '%-16s %s\n' "$$name" "$$text"; done

setup: $(COURSE) ## create .venv and install the course (the other commands do this first)
	@echo "$(VENV) is ready"

course: $(COURSE) ## open your copies of the notebooks (my/notebooks) in JupyterLab, on this machine only
	@$(RUN) -m actmem_course.copies course $(addprefix --fresh=,$(FRESH))
	JUPYTER_CONFIG_PATH="$(LAB_CONFIG)$${JUPYTER_CONFIG_PATH:+:$$JUPYTER_CONFIG_PATH}" $(RUN) -m jupyterlab --ip=127.0.0.1 --ServerApp.root_dir=. \
	  --LabApp.default_url=/lab/tree/my/notebooks/01_memory_wall.ipynb $$(test "$$(id -u)" != 0 || echo --allow-root)

labs: $(COURSE) ## put your copies of the exercises into my/labs (FRESH=lab2: a new one, yours is kept)
	@$(RUN) -m actmem_course.copies labs $(addprefix --fresh=,$(FRESH))

measure: $(COURSE) ## measure Table 2 on this machine, with 2 processes (PROCESSES=4 ARGS="--dtype float32")
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(VENV)/bin/torchrun --standalone --nproc-per-node $(PROCESSES) \
	  labs/measure_table2.py $(ARGS)

lint: $(TESTS) ## check style, format, types, imports and the length of chapters: a part of `make test`
	@$(RUN) -m ruff check --quiet $(SOURCES)
	@$(RUN) -m ruff format --check --quiet $(SOURCES)
	@found=$$($(RUN) -c 'from importlinter.cli import lint_imports_command as run; run()' --no-logo --no-cache) || { echo "$$found"; exit 1; }
	@$(RUN) -m mypy
	@counted=$$($(RUN) -m notebooks.source.words) || { echo "$$counted"; exit 1; }

# What must pass before pytest is a prerequisite; pytest's summary stays the last output.  By day each process has one
# thread, which leaves the other cores to the others.
test: $(TESTS) lint ## run what CI runs: lint, tests, every notebook against its stored outputs (FAST=1: what an edit needs)
	FAST=$(FAST) ALL=$(ALL)$(if $(filter 1,$(ALL)),, OMP_NUM_THREADS=1) $(RUN) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(if $(filter 1,$(FAST)),,$(NBVAL)) $(PYTEST_ARGS)

test-all: ## run all tests there are, also those that CI runs at night
	@$(MAKE) --no-print-directory test ALL=1

gpus: $(COURSE) ## run every measuring lab on all GPUs of this host, and write gpus.json and gpus.html (ARGS="--ranks 2")
	@$(RUN) labs/measure_host.py --json gpus.json --html gpus.html $(ARGS)

matrix: $(COURSE) ## test the library on every torch from 2.9 on; downloads gigabytes (ARGS="2.9.1", KEEP=1 keeps them)
	KEEP=$(KEEP) $(RUN) .ci/matrix.py $(ARGS)

tapes: $(TESTS) ## record again what the stages of the planner's models make and free: a few minutes on all cores
	OMP_NUM_THREADS=1 $(RUN) -m tests.tape.stages

notebooks: $(TESTS) ## run the notebooks' sources again and store what they show (ARGS="02 05" for some of them)
	$(RUN) -m notebooks.source.build $(ARGS)

site: $(SITE_TOOLS) ## build the course as web pages with sliders that work without a server, in build/site
	@$(RUN) -m notebooks.site.build

clean: ## remove .venv and all else that these commands wrote here, but not my/, which is yours
	rm -rf $(VENV) .pytest_cache .hypothesis .mypy_cache .ruff_cache build dist src/*.egg-info
	find . \( -name .git -o -path ./my \) -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -type d -prune -exec rm -rf {} +

$(COURSE): pyproject.toml constraints.txt | $(RUN)
	@$(if $(CPU),$(cpu_index_answers))
	@echo "Installing the course into $(VENV) (about a minute the first time, after that skipped)"
	@$(call pip_install,.[course])
	@touch $@

$(SITE_TOOLS): $(COURSE)
	@echo "Installing what builds the site into $(VENV)"
	@$(call pip_install,.[site])
	@touch $@

$(TESTS): $(SITE_TOOLS)
	@echo "Installing the test tools into $(VENV)"
	@$(call pip_install,.[test])
	@touch $@

$(RUN):
	@for python in $(or $(PYTHON),$(PYTHONS)); do \
	  if "$$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' >/dev/null 2>&1; then \
	    echo "Making $(VENV) with $$("$$python" --version)"; \
	    "$$python" -m venv --clear $(VENV) >/dev/null 2>&1 && exit 0; \
	    rm -rf $(VENV); \
	    echo "$$python can't make virtual environments; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; \
	  fi; \
	done; \
	echo "No Python 3.10 to 3.14 found (looked for: $(or $(PYTHON),$(PYTHONS))); install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python" >&2; exit 1

# Asked once and for a limited time: pip would wait for each package in turn, ten silent minutes.
define cpu_index_answers
$(RUN) -c 'import os, signal, sys; signal.alarm($(CPU_INDEX_SECONDS)); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])' \
  -m pip index versions torch --index-url $(CPU_INDEX) --timeout 10 --retries 1 --disable-pip-version-check >/dev/null 2>&1 || { \
  echo "$(CPU_INDEX) did not answer: leave CPU=1 out to take torch from pip's usual index, or name a mirror: CPU_INDEX=..." >&2; exit 1; }
endef

# Runs pip and shows its current step on one line; only errors stay on the screen.  The log is kept.
# A pipe hides pip's exit code, so it is sent as the last line.
define pip_install
{ $(RUN) -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt \
    $(if $(CPU),--extra-index-url $(CPU_INDEX)) -e '$(1)'; echo "pip-exit $$?"; } 2>&1 | tee $(VENV)/pip.log | { \
  while read -r line; do \
    case "$$line" in \
      Collecting*|Downloading*|Installing*) if test -t 1; then printf '\r  %-72.72s' "$$line"; fi;; \
      ERROR*|error*) if test -t 1; then printf '\r%-74s\r' ''; fi; printf '%.300s\n' "$$line" >&2;; \
      "pip-exit "*) if test -t 1; then printf '\r%-74s\r' ''; fi; \
        test "$$line" = "pip-exit 0" && exit 0; \
        echo "pip failed; its whole log is in $(VENV)/pip.log" >&2; exit 1;; \
    esac; \
  done; exit 1; }
endef
