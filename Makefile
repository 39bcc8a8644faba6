# `make quickstart` trains a small model, `make check` and `make test` hold a change to the rules. Installing is done
# once; running again costs nothing.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Compiled on all cores afterwards. Some packages ship files that this Python cannot compile.
INSTALL := $(PIP) install --quiet --no-compile --constraint constraints.txt
COMPILE := $(BIN)/python -m compileall -qq -j 0 .venv/lib || true

.PHONY: quickstart test test-slow check numerics clean docs

quickstart: .venv/.installed
	$(BIN)/fullshard train quickstart

# One worker for each core, at least two: many tests wait for ranks. The files keep their order: the many small ones come
# last and fill every worker.
WORKERS := $(shell cores=$$(nproc); test $$cores -gt 2 && echo $$cores || echo 2)
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: .venv/.installed-test namespaces slurm chromium
	$(PYTEST) -m "not slow"

# Whole matrices, lists of faults, and copies of the repository without a family. One worker more, since faults that end
# by a timeout leave a core idle.
test-slow: .venv/.installed-test namespaces slurm chromium
	$(PYTEST) -n $$(($(WORKERS) + 1)) -m "slow and not faults"

# Programs that tests need are installed as root, or by a sudo that asks for no password. Tests of what could not be
# installed are skipped; with CI=true they fail.
SUDO = $(shell test "$$(id -u)" = 0 || { sudo -n true 2>/dev/null && echo sudo -n || echo false; })
APT = $(SUDO) apt-get update -qq && $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq

# Two nodes are two network namespaces, which only root may create, with `ip`.
.PHONY: namespaces
namespaces:
	@PATH="$$PATH:/usr/sbin:/sbin" command -v ip >/dev/null || { $(APT) iproute2; } || \
		echo "iproute2 could not be installed"

# Jobs run on a real Slurm, which a test starts on this machine for itself.
.PHONY: slurm
slurm:
	@{ export PATH="$$PATH:/usr/sbin:/sbin"; command -v slurmctld && command -v munged; } >/dev/null || \
		{ $(APT) slurm-wlm munge; } || echo "slurm-wlm and munge could not be installed"

# Reports open in a real browser.
.PHONY: chromium
chromium:
	@command -v chromium >/dev/null || { $(APT) --no-install-recommends chromium; } || \
		echo "chromium could not be installed"

# Faults of a kind that `make test-slow` tries elsewhere, then at least 100 recoveries from faults drawn at random, which
# writes benchmarks/faults.md. It takes more than an hour.
.PHONY: test-faults
test-faults: .venv/.installed-test
	$(PYTEST) -m faults
	$(BIN)/python -m tests.drills.many

# Every test that compares floating-point numbers, with the kernels of other processors and other numbers of threads.
# Idle threads do not spin, since every rank of a test has its own.
COMPARING := $(shell grep -rlE 'approx|assert_near|assert_close|allclose|apart' tests --include='test_*.py')
SETTINGS := ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 ATEN_CPU_CAPABILITY=avx512 ONEDNN_MAX_CPU_ISA=AVX2 \
	OMP_NUM_THREADS=1 OMP_NUM_THREADS=$(shell nproc)

numerics: $(SETTINGS:%=numerics-%)

numerics-%: .venv/.installed-test
	GOMP_SPINCOUNT=0 $* $(PYTEST) $(COMPARING)

check: .venv/.installed-check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/arch

# The site, in build/site. Warnings, such as a link that leads nowhere, are errors.
docs: .venv/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# torch first and pinned: the constraint alone would let another package choose a build.
.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) torch
	$(INSTALL) --editable .
	$(COMPILE)
	touch $@

.venv/.installed-test: .venv/.installed
	$(INSTALL) --editable '.[test]'
	$(COMPILE)
	touch $@

.venv/.installed-check: .venv/.installed-test
	$(INSTALL) --editable '.[test,check]'
	touch $@

.venv/.installed-docs: .venv/.installed
	$(INSTALL) --editable '.[docs]'
	touch $@

clean:
	rm -rf .venv
