# `make demo` and `make test` need Python 3.11 or newer and a network that reaches PyPI; everything lands in .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
# Named first in every install: a bare `torch` would bring CUDA packages of several GB along.
TORCH ?= torch==2.13.0
BUDGET ?= 400MiB
GPU_PYTHON_VERSION ?= 3.12
# Processes that tests run in; each takes up to 3 GiB.
WORKERS ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --quiet
RUN := PYTHONPATH=$(CURDIR) $(BIN)/python
INSTALLED := $(VENV)/.installed
DOCS_INSTALLED := $(VENV)/.docs-installed

CUDA_BUILD := $(BIN)/python benchmarks/cuda_build.py
NOT_HERE := 3
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Budgets of memfit.checkpoint count all memory of the process: its tests run in processes without others.
APART := --ignore-glob "*/test_checkpoint*.py"
# Once, for all processes of the tests; they are found by a hash of their sources.
COMPILE_LIBRARIES := from memfit.memory.arena.library import load_arena_library as load; \
	from memfit.system.recorder import allocated_bytes; load('cuda'); allocated_bytes('cpu')

# Compiled files of Python are kept, whatever the environment says: each process of the tests would compile for 10 s.
export PYTHONDONTWRITEBYTECODE :=

.DELETE_ON_ERROR:
.PHONY: demo picture test test-all test-ci durations test-cuda test-torch lint bench evidence gpu gpu-rehearsal wheels docs clean

# Fits a ResNet-50 step into $(BUDGET), runs it, proves that its gradients are the same bits, and leaves a report.
demo: $(INSTALLED)
	@mkdir -p demo
	@$(BIN)/memfit fit resnet50 --budget $(BUDGET) --save demo/plan.json --report demo/report.html
	@echo "Open $(CURDIR)/demo/report.html in a browser."

# The picture in the README; needs Chromium.
picture: $(INSTALLED)
	@mkdir -p demo
	@$(BIN)/memfit plan resnet50 --budget $(BUDGET) --save demo/plan.json
	@$(BIN)/memfit report demo/plan.json -o docs/resnet50.png

# Minutes on two cores. `test-all` adds the tests marked `slow`.
test: $(INSTALLED)
	@$(BIN)/python -m pytest $(PARALLEL) -m "not gpu and not slow" $(APART)
	@$(BIN)/python -m pytest $(PARALLEL) -m "not gpu and not slow" tests/test_checkpoint*.py

test-all: $(INSTALLED)
	@$(BIN)/python -m pytest $(PARALLEL) -m "not gpu and not short" $(APART)
	@$(BIN)/python -m pytest $(PARALLEL) -m "not gpu and not short" tests/test_checkpoint*.py

# `test`, and a fifth of the slow ones, another fifth for each commit.
test-ci: $(INSTALLED)
	@$(BIN)/python -m pytest $(PARALLEL) -m "not gpu" $(APART) --slow-fifth "$$(git rev-list --count HEAD)"
	@$(BIN)/python -m pytest $(PARALLEL) -m "not gpu" tests/test_checkpoint*.py --slow-fifth "$$(git rev-list --count HEAD)"

# All tests, to store what each takes: those that take long are `slow` (tests/durations.py).
durations: $(INSTALLED)
	@$(BIN)/python -m pytest $(PARALLEL) -m "not gpu" --store-durations $(APART)
	@$(BIN)/python -m pytest $(PARALLEL) -m "not gpu" --store-durations tests/test_checkpoint*.py

# On torch's own CUDA build over a GPU that is not there (benchmarks/cuda_build.py); needs the headers of a CUDA toolkit.
test-cuda: $(INSTALLED)
	@$(CUDA_BUILD) make >/dev/null || { [ $$? = $(NOT_HERE) ] || exit 1; \
		echo "make test-cuda: tests/cuda_build and the tests marked gpu did not run"; exit 0; }; \
	$(CUDA_BUILD) run -c "$(COMPILE_LIBRARIES)" && \
	$(CUDA_BUILD) run -m pytest -n $(WORKERS) --tb=line tests/cuda_build && \
	$(CUDA_BUILD) run -m pytest -m "gpu and not arithmetic" --tb=line $$(grep -l pytest.mark.gpu tests/test_*.py)

# The same on another torch, and on another Python if PYTHON names one: `make test-torch TORCH=2.15.0 PYTHON=python3.13`.
test-torch:
	@$(PYTHON) benchmarks/versions.py $(TORCH:torch==%=%) --workers $(WORKERS)

lint: $(INSTALLED)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --pythonpath $(BIN)/python
	@$(BIN)/pyright --pythonpath $(BIN)/python --project benchmarks

docs: $(DOCS_INSTALLED)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site
	@echo "Open $(CURDIR)/site/index.html in a browser."

bench: $(INSTALLED)
	@for script in torch_baselines sweep compare_baselines plan_shared_graphs prove_small_graphs planning_time \
		offloading inplace simulate_speed guard_cost packing arena cuda_reserved chen_figures feng_table1 joint_plans profile_without_memory \
		disk_tier offloading_planners offloading_planners_picture dqn_curves functions variable_shapes \
		loop_cost eager_mode checkpoint run_scripts doors dispatch_modes dense_cuts tables; do \
		echo "benchmarks/$$script.py"; $(RUN) benchmarks/$$script.py || exit 1; \
	done

# A row of the last table of docs/papers.md: `make evidence ROW=chen-figure-5` runs what shows it, `make evidence` lists the rows.
evidence: $(INSTALLED)
	@$(RUN) benchmarks/evidence.py $(ROW)

# The tests marked `gpu` and the figures by which memfit is judged, in ten minutes; one JSON. See benchmarks/gpu.py.
# `make gpu GPU_ARGUMENTS=--first` runs the tests and rows 0 and 1, `GPU_ARGUMENTS="--rows 2 4"` only these rows.
gpu:
	@$(PYTHON) benchmarks/make_gpu.py $(GPU_ARGUMENTS)

# The same over the CUDA build of torch without a GPU: bytes are checked, all code runs, nothing is computed.
gpu-rehearsal: $(INSTALLED)
	@$(CUDA_BUILD) make >/dev/null || { [ $$? = $(NOT_HERE) ] || exit 1; \
		echo "make gpu-rehearsal: nothing was rehearsed"; exit 0; }; \
	$(CUDA_BUILD) run benchmarks/gpu.py --rehearsal $(GPU_ARGUMENTS)

# What `make gpu` lacks on a machine without a network: run this on one that has it, and bring wheels/ along.
wheels:
	@$(PYTHON) benchmarks/make_gpu.py --wheels $(GPU_PYTHON_VERSION)

clean:
	rm -rf $(VENV) build dist wheels site demo memfit.egg-info .pytest_cache .ruff_cache .hypothesis

# pytorchcv asks for torchvision, which memfit never needs.
$(INSTALLED): pyproject.toml constraints.txt
	@echo "installing memfit and its tools into $(VENV) (a minute or two)"
	@$(PYTHON) -c 'import sys; sys.exit("memfit needs Python 3.11 or newer, $(PYTHON) is " + sys.version) if sys.version_info < (3, 11) else None'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) $(TORCH) -c constraints.txt -e '.[bench,dev,dqn,transformers,accelerate,lightning]'
	@$(PIP) $(TORCH) -c constraints.txt --no-deps pytorchcv
	@$(BIN)/memfit calibrate > /dev/null || true  # compiles what the first plan would wait for
	@touch $@

$(DOCS_INSTALLED): $(INSTALLED)
	@$(PIP) $(TORCH) -c constraints.txt -e '.[docs]'
	@touch $@
