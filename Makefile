# The README's two commands are `make quickstart` and `make test`. Installing is done once; re-running costs nothing.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Compiled on all cores afterwards; some files of packages are no Python of today.
INSTALL := $(PIP) install --quiet --no-compile --constraint constraints.txt
COMPILE := $(BIN)/python -m compileall -qq -j 0 .venv/lib || true

.PHONY: quickstart test check numerics clean

quickstart: .venv/.installed
	$(BIN)/fullshard train quickstart

# The files in their order: the many small ones come last and fill both workers. Two nodes are two network namespaces,
# which `ip` makes and only root may.
test: .venv/.installed-test
	@test "$$(id -u)" != 0 || PATH="$$PATH:/usr/sbin:/sbin" command -v ip >/dev/null || \
		{ apt-get update -qq && apt-get install -y -qq iproute2; } || echo "iproute2 could not be installed"
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Every test that compares floating-point numbers, with the kernels of other processors and other numbers of threads.
# Idle threads do not spin: every rank of a test has its own.
COMPARING := $(shell grep -rlE 'approx|assert_near|assert_close|allclose|apart' tests --include='test_*.py')
SETTINGS := ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 ATEN_CPU_CAPABILITY=avx512 ONEDNN_MAX_CPU_ISA=AVX2 \
	OMP_NUM_THREADS=1 OMP_NUM_THREADS=$(shell nproc)

numerics: $(SETTINGS:%=numerics-%)

numerics-%: .venv/.installed-test
	GOMP_SPINCOUNT=0 $* $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(COMPARING)

check: .venv/.installed-check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/arch

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

clean:
	rm -rf .venv
