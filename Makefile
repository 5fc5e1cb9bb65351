# make demo | make test | make docs | make wheel create the environment, build, and run; they are quick the second time.
# TORCH=2.15.0 and PYTHON=python3.13 select other versions, each with its own environment and objects; ARGS="…" is
# passed to the command.
DEFAULT_TORCH := 2.13.0
TORCH ?= $(DEFAULT_TORCH)
DEFAULT_PYTHON := $(shell command -v python3.11 || command -v python3)
PYTHON ?= $(DEFAULT_PYTHON)
PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
OTHER_PYTHON := $(if $(filter-out $(shell $(DEFAULT_PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'),$(PYTHON_VERSION)),-py$(PYTHON_VERSION))
VENV := .venv-$(TORCH)$(OTHER_PYTHON)
BIN := $(VENV)/bin
ARGS ?=

SHELL := /bin/bash
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONUNBUFFERED := 1

CSRC := $(shell find csrc openreg_ops/include -type f)
PACKAGE := $(shell find openreg_ops openreg_tools meta -name '*.py' -not -name _build.py) openreg_device.py openreg_device.pth pytest_openreg_ops.py

.PHONY: demo test test-fast test-cuda docs clients suites new-backend bench conformance mutants lint lint-aarch64 install wheel try-wheel sdist release-check drift clean
.DELETE_ON_ERROR:

demo: install
	$(BIN)/python -P examples/train_char_transformer.py $(ARGS)

# One more worker process than the machine has cores, because tests wait for their own subprocesses. If a worker crashes, the
# run ends, because pytest-xdist can wait for ever for a replaced worker's files. Bytecode is written, because hundreds of
# processes read it. `make test ARGS=…` runs the selected tests in one process, which starts immediately.
PROCESSES := 3
PARALLEL = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

test: install
	$(if $(ARGS),$(BIN)/pytest $(ARGS),$(PARALLEL))

# Of tests/tools and tests/project, the files of what most changes reach.
FAST := runtime backend aten ops graph $(addprefix tools/test_,$(addsuffix .py,checker command_line compare core \
	explain operators_command pytest_plugin report trace)) $(addprefix project/test_,$(addsuffix .py,docstrings imports includes internals))

# These tests start no programs to wait for, so a third process would only import PyTorch once more.
test-fast: PROCESSES := 2
test-fast: install
	$(PARALLEL) -m "fast or not (slow or processes or compiles or conformance)" $(addprefix tests/,$(FAST)) $(ARGS)

# The operators under the name cuda, which `make test` tests by programs and by a sample of PyTorch's operators.
test-cuda: install
	OPENREG_DEVICE=cuda $(PARALLEL) tests/ops tests/cuda/inside $(ARGS)

# The site, build/docs/index.html; a warning is an error, as in tests/project/test_site.py.
docs: install
	$(BIN)/python -m sphinx -W --keep-going -b html docs build/docs $(ARGS)

clients: install $(VENV)/.clients
	HF_HUB_OFFLINE=1 $(BIN)/pytest tests/clients $(ARGS)

suites: install
	$(BIN)/pytest tests/suites $(ARGS)

# The package that `openreg-tools new-backend` writes. A process loads one backend, so openreg_ops stays out.
new-backend: export TORCH_DEVICE_BACKEND_AUTOLOAD := 0
new-backend: install
	rm -rf build/new_backend
	$(BIN)/python -m openreg_tools new-backend acme --into build/new_backend
	cd build/new_backend && $(abspath $(BIN))/python setup.py -q build_ext --inplace
	cd build/new_backend && $(abspath $(BIN))/python -m pytest -p no:pytest_openreg_ops $(ARGS)

bench: install
	$(BIN)/python benchmarks/bench.py $(ARGS)

# Without ARGS, 2000 generated calls follow.
conformance: install
	$(BIN)/python -P -m openreg_ops conformance $(ARGS)
	$(if $(ARGS),,$(BIN)/python -P -m openreg_ops conformance --generate 2000)

mutants: install
	$(BIN)/python tests/mutants.py $(ARGS)

# For x86-64-v2 and later, and one torch: dist/openreg_ops-VERSION+torchTORCH-….whl, without torch's libraries.
# OPENREG_LABEL= omits the label after the version, for upload to an index.
wheel: export OPENREG_RELEASE := 1
wheel: $(VENV)/.wheel
	rm -rf build/*-torch-$(TORCH)*/lib* build/wheels openreg_tools/build
	$(BIN)/python setup.py build_ext
	$(BIN)/pip wheel --no-deps --no-build-isolation --wheel-dir build/wheels .
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/auditwheel repair --strip --exclude 'libc10*' --exclude 'libtorch*' \
		--exclude 'libgomp*' --exclude 'libopenreg_ops*' --exclude 'openreg_ops._C*' --wheel-dir dist build/wheels/openreg_ops-*.whl
	$(BIN)/pip wheel --no-deps --no-build-isolation --wheel-dir dist ./openreg_tools
	rm -rf openreg_tools/build
	ls -l dist

# Installs the wheels in a new environment that has only pip, and uses them.
try-wheel:
	$(PYTHON) tests/project/try_wheel.py --torch $(TORCH) $(or $(ARGS),dist)

sdist: $(VENV)/.wheel
	OPENREG_RELEASE=1 OPENREG_LABEL= $(BIN)/python -m build --sdist --no-isolation --outdir dist .
	$(BIN)/python -m build --sdist --no-isolation --outdir dist openreg_tools

# Everything that a release does for one torch, without publishing it; ends in a summary.
release-check: install $(VENV)/.wheel
	$(BIN)/python release/check.py --torch $(TORCH) --python $(PYTHON)

# What changed since the newest working torch, and which registrations break. Needs no build.
drift: $(VENV)/.requirements
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(BIN)/python -m openreg_tools drift 2.15.0 installed --sources csrc openreg_ops meta --role dense $(ARGS)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CSRC)
	MYPYPATH=. $(BIN)/mypy --strict --follow-imports=silent tests/project/typed_program.py

# Debian's g++-aarch64-linux-gnu compiles every file but links nothing, because torch's libraries here are for x86-64.
lint-aarch64: $(VENV)/.requirements
	CXX=aarch64-linux-gnu-g++ $(BIN)/python setup.py build_ext --objects

clean:
	rm -rf build dist out *.egg-info openreg_tools/build openreg_tools/*.egg-info .venv-* openreg_ops/_build.py openreg_ops/_*.so

install: $(VENV)/.installed

$(VENV)/.requirements: requirements.txt
	@echo "== $(VENV): torch $(TORCH) and requirements.txt"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install torch==$(TORCH) -r requirements.txt
	@touch $@

$(VENV)/.lint: requirements-lint.txt | $(VENV)/.requirements
	$(BIN)/pip install -r requirements-lint.txt
	@touch $@

$(VENV)/.wheel: requirements-wheel.txt | $(VENV)/.requirements
	$(BIN)/pip install -r requirements-wheel.txt
	@touch $@

$(VENV)/.clients: tests/clients/requirements.txt | $(VENV)/.requirements
	$(BIN)/pip install torch==$(TORCH) -r tests/clients/requirements.txt
	@touch $@

# The default torch gets an editable install: Python files need no step, C++ files an incremental build. Any other torch
# gets its own copy, so that the checkout holds only one extension. Either way, setup.py compiles first, showing
# progress, and pip finds the objects ready.
ifeq ($(VENV),.venv-$(DEFAULT_TORCH))
$(VENV)/.built: $(VENV)/.requirements setup.py $(CSRC)
	@echo "== building for torch $(TORCH)"
	$(BIN)/python setup.py build_ext --inplace
	@touch $@

$(VENV)/.installed: pyproject.toml openreg_tools/pyproject.toml build_backend.py | $(VENV)/.built
	$(BIN)/pip install --no-deps --no-build-isolation --editable ./openreg_tools --editable .
	@touch $@
else
$(VENV)/.installed: $(VENV)/.requirements setup.py pyproject.toml openreg_tools/pyproject.toml build_backend.py $(CSRC) $(PACKAGE)
	@echo "== building for torch $(TORCH)"
	rm -rf build/*-torch-$(TORCH)*/lib* openreg_tools/build
	$(BIN)/python setup.py build_ext
	$(BIN)/pip install --no-deps --no-build-isolation --force-reinstall ./openreg_tools .
	rm -rf openreg_tools/build
	@touch $@
endif
