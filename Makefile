# `make` lists the targets. It needs Python >= 3.10 and installs everything else into .venv, or uses
# an interpreter that has the dependencies: make test PY=python3

PYTHON ?= python3
VENV ?= .venv
CORPUS ?=
# configs/sample.yaml suits the small sample, configs/text8.yaml a larger CORPUS.
CONFIG ?= $(if $(filter-out enwiki-sample,$(CORPUS)),configs/text8.yaml,configs/sample.yaml)
CONFIGS ?= configs/optimizers/*.yaml
SEEDS ?= 1
# Processes that share the tests: one per core, up to 8; 0 for none, as a debugger needs it.
JOBS ?= auto
ARGS ?=
OPT ?=
RUN ?= latest

# The stamp files make `make` install again when a pinned version changes.
ifdef PY
INSTALLED :=
TOOLS :=
else
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
TOOLS := $(VENV)/.tools
endif
PIP = $(VENV)/bin/python -m pip install --disable-pip-version-check -c .ci/constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup train evaluate compare sweep test test-faults test-readme test-gpu sanitize \
  bench bench-cpu bench-transfer bench-train bench-zipf bench-ranks bench-precision bench-run \
  bench-library smoke docs lint clean test-clients

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' \
	  $(firstword $(MAKEFILE_LIST))
	@echo "  variables: CORPUS=text8|path  CONFIG=configs/x.yaml  ARGS='model.window=3 ...'"
	@echo "             CONFIGS='configs/optimizers/adam*.yaml'  SEEDS='1 2 3'  OPT=Adamax"
	@echo "             RUN=runs/x  GPUS=4  JOBS=4  PYTHON=python3.x  PY=interpreter"

setup: $(INSTALLED) ## create .venv with pinned packages: CuPy with a GPU, else torch for CPUs
	@echo "ready: source $(VENV)/bin/activate && w2v train my.txt"

$(VENV)/.installed: pyproject.toml .ci/constraints.txt Makefile
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit("Python " + v + " is too old; \
	3.10 or newer is needed: make setup PYTHON=python3.12" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)
	@cuda=$$(nvidia-smi 2>/dev/null | \
	  sed -n 's/.*CUDA[A-Z ]* Version: *\([0-9][0-9]*\).*/\1/p' | head -n 1); \
	if [ -z "$$cuda" ]; then torch=2.13.0 extras=report,tensorboard found="no CUDA driver"; \
	elif [ "$$cuda" -ge 13 ]; then torch=2.13.0 extras=report,tensorboard,cuda13 found="CUDA $$cuda"; \
	elif [ "$$cuda" -eq 12 ]; then torch=2.10.0 extras=report,tensorboard,cuda12 found="CUDA $$cuda"; \
	else echo "nvidia-smi reports CUDA $$cuda; 12 or newer is needed: update the NVIDIA driver" >&2; \
	  exit 1; fi; \
	echo "nvidia-smi reports $$found: installing torch $$torch and .[$$extras]"; \
	if [ -z "$$cuda" ]; then \
	  $(PIP) -q uv && UV_HTTP_RETRIES=1 $(VENV)/bin/uv pip install --python $(VENV)/bin/python \
	    --torch-backend cpu -c .ci/constraints.txt "torch==$$torch" || \
	  echo "torch's CPU build could not be fetched: pip installs what its index has" >&2; \
	fi; \
	$(PIP) "torch==$$torch" -e ".[$$extras]"
	$(VENV)/bin/w2v warm-up
	@touch $@

$(VENV)/.tools: $(INSTALLED)
	$(PIP) -q -e ".[dev]"
	@touch $@

train: $(INSTALLED) ## train, export and score: CORPUS, CONFIG, ARGS, GPUS=4
	$(PY) train.py $(CONFIG) $(if $(CORPUS),"corpus.path=$(CORPUS)") $(ARGS) \
	  $(if $(GPUS),--gpus $(GPUS))

evaluate: $(INSTALLED) ## score a run: RUN (the latest by default)
	$(PY) evaluate.py score $(RUN)

compare: $(INSTALLED) ## train CONFIGS with SEEDS and compare them: runs/compare-<date>/
	$(PY) evaluate.py compare $(CONFIGS) $(if $(CORPUS),"corpus.path=$(CORPUS)") $(ARGS) \
	  --base $(CONFIG) --seeds $(SEEDS)

sweep: $(INSTALLED) ## search the best settings of OPT: ARGS='section.key=value,value'
	@test -n "$(OPT)" || { echo "say which: make sweep OPT=Adamax" >&2; exit 2; }
	$(PY) evaluate.py sweep $(OPT) $(if $(CORPUS),"corpus.path=$(CORPUS)") $(ARGS) \
	  --base $(CONFIG) --seeds $(SEEDS)

# Byte code is kept, or pytest would rewrite all assertions anew in each process.
TEST_ON_CPU = CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -q -n $(JOBS) \
  --maxprocesses 8 --dist worksteal

test: $(TOOLS) ## run the tests that need no GPU
	$(TEST_ON_CPU) -m "not gpu" $(ARGS)

# In a virtual environment of their own, with the packages of this one behind them. Those of
# OLD_CLIENTS pin packages that are older than NumPy 2, and train with newer ones.
CLIENTS := transformers==5.24.0 accelerate==1.15.0 lightning==2.6.6 torch-geometric==2.8.1
OLD_CLIENTS := recbole==1.2.1 karateclub==1.3.3 node2vec==0.5.0 pyrdf2vec==0.2.3 \
  thop==0.1.1.post2209072238
OF_OLD_CLIENTS := aiohttp==3.14.5 attrs==26.1.0 cachetools==4.2.4 colorama==0.4.6 colorlog==6.12.0 \
  nest-asyncio==1.6.0 pandas==3.1.1 plotly==6.9.0 pygsp==0.6.1 python-levenshtein==0.27.5 \
  python-louvain==0.16 rdflib==7.6.0 tabulate==0.10.0 texttable==1.7.2
CLIENTS_VENV := build/clients
test-clients: $(TOOLS) ## train paged models and graphs in programs of others; three minutes
	$(PY) -m venv $(CLIENTS_VENV)
	$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > $$(echo $(CLIENTS_VENV)/lib/python*/site-packages)/own.pth
	$(CLIENTS_VENV)/bin/python -m pip install -q --disable-pip-version-check $(CLIENTS) $(OF_OLD_CLIENTS)
	$(CLIENTS_VENV)/bin/python -m pip install -q --disable-pip-version-check --no-deps $(OLD_CLIENTS)
	CUDA_VISIBLE_DEVICES= $(CLIENTS_VENV)/bin/python -m pytest -q tests/clients $(ARGS)

# The last lines need a GPU; estimates one for themselves.
test-faults: $(TOOLS) ## kill runs 170 times, try 2,600 random inputs and damages; ten minutes
	W2V_KILLS=50 W2V_RANK_KILLS=20 W2V_CASES=400 W2V_DAMAGES=500 W2V_SLOW=1 $(TEST_ON_CPU) -m "not gpu" \
	  tests/unit/test_gensim.py tests/faults/test_damage.py tests/faults/test_estimates.py tests/faults/test_faults_kill.py \
	  tests/faults/test_ranks.py tests/faults/test_hosts.py tests/faults/test_faults_random.py \
	  tests/e2e/test_items.py tests/e2e/test_warm_up.py tests/oracle/test_cpu.py $(ARGS)
	W2V_KILLS=20 W2V_RANK_KILLS=20 W2V_STRESS_STEPS=10000 W2V_SLOW=1 $(PY) -m pytest -q -rs -m gpu \
	  -n $(JOBS) --maxprocesses 8 tests/faults tests/oracle/test_cache.py \
	  --ignore tests/faults/test_estimates.py $(ARGS)
	W2V_SLOW=1 $(PY) -m pytest -q -rs -m gpu tests/faults/test_estimates.py $(ARGS)

test-readme: $(TOOLS) ## run the make commands of README, build the site; some minutes
	OMP_NUM_THREADS=1 W2V_README=1 $(PY) -m pytest -q tests/e2e/test_docs.py \
	  -k "line_by_line or tour or site" $(ARGS)

# Tests marked `alone` wait for the others; those marked `slow` are left to test-faults.
test-gpu: GPU_JOBS = 8
test-gpu: $(TOOLS) ## run the tests that need a GPU, in GPU_JOBS processes
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -rs -m gpu -n $(GPU_JOBS) --dist worksteal $(ARGS)

# Without torch's cache every tensor is an allocation, whose bounds the checker knows. torch's own
# kernels are left out. Races are possible only in kernels that share memory in a block.
CHECKED := edges or round_as_encode or (training_on_a_gpu and Adam and not (Adamax or AdamW)) or \
  plans_made or plans_of or of_a_gpu or (test_cache and mapped and not dense) or \
  (twenty_epochs and fused and bf16) or shard_kernels or kernel_draws
SANITIZE = PYTORCH_NO_CUDA_MEMORY_CACHING=1 W2V_STRESS_STEPS=1000 \
  compute-sanitizer --error-exitcode 1 --report-api-errors no --kernel-name-exclude kns=native
sanitize: $(TOOLS) ## check CUDA kernels by compute-sanitizer; up to 15 minutes
	$(SANITIZE) --tool memcheck $(PY) -m pytest -q -m gpu tests/oracle/test_cache.py \
	  tests/oracle/test_kernels.py tests/oracle/test_ranks_equal_one.py \
	  tests/oracle/test_repeatable.py tests/unit/test_sampler.py tests/unit/test_embedding.py \
	  -k "$(CHECKED)"
	$(SANITIZE) --tool racecheck $(PY) -m pytest -q -m gpu tests/oracle/test_cache.py \
	  tests/oracle/test_kernels.py tests/oracle/test_ranks_equal_one.py \
	  tests/unit/test_embedding.py \
	  -k "of_a_gpu or edges or plans_made or shard_kernels or ((stress or lookahead) and mapped)"

bench-cpu: $(INSTALLED) ## compare with gensim on CORPUS into tests/bench/results/
	CUDA_VISIBLE_DEVICES= $(PY) tests/bench/cpu.py --corpus "$(CORPUS)" $(ARGS)

bench-transfer: $(INSTALLED) ## measure transfers of rows into tests/bench/results/
	$(PY) tests/bench/transfer.py $(ARGS)

bench-train: SEEDS = 1 2 3
bench-train: CONFIGS = $(patsubst %,configs/optimizers/%.yaml,adamax rmsprop adam sgd)
bench-train: $(INSTALLED) ## measure whole runs and the stages of a step: CORPUS, CONFIGS
	$(PY) tests/bench/train.py --corpus $(or $(CORPUS),text8) --configs $(CONFIGS) \
	  --engines resident mapped:50% --precisions float32 bf16 --seeds $(SEEDS) $(ARGS)

bench-zipf: $(INSTALLED) ## train 10 M generated words with a cache of 10 %; 40 GiB of memory
	$(PY) tests/bench/zipf.py $(ARGS)

bench-ranks: $(INSTALLED) ## train 10 M generated words on GPUS=N; 40 GiB of memory
	$(if $(GPUS),$(PY) -m torch.distributed.run --nproc-per-node $(GPUS),$(PY)) \
	  tests/bench/ranks.py $(ARGS)

bench-precision: $(INSTALLED) ## measure steps by batch size and precision: CORPUS
	$(PY) tests/bench/precision.py --corpus $(or $(CORPUS),text8) $(ARGS)

bench-run: $(INSTALLED) ## measure whole commands and their phases: CORPUS, ARGS="--large 40"
	$(PY) tests/bench/run.py --corpus "$(CORPUS)" $(ARGS)

bench-library: $(INSTALLED) ## measure embeddings and rows beside torch, clicks on GPUS=N; 40 GiB
	$(if $(GPUS),$(PY) -m torch.distributed.run --nproc-per-node $(GPUS),$(PY)) \
	  tests/bench/library.py $(if $(GPUS),--parts clicks) $(ARGS)

bench: bench-transfer bench-train bench-zipf bench-precision ## run the benchmarks of one GPU

smoke: $(INSTALLED) ## run train.py and evaluate.py on the CPU, in half a minute
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	$(PY) train.py $(CONFIG) corpus.path=enwiki-sample "corpus.data_dir=$$folder/data" \
	  "run.dir=$$folder/runs" model.vector_size=32 train.epochs=1 train.device=cpu $(ARGS) && \
	$(PY) evaluate.py score "$$folder"/runs/*/

docs: $(INSTALLED) ## write settings, tables and pictures into docs/, then build/site; check links
	$(PY) -c "import matplotlib, htmlproofer, material, mkdocstrings, mkdocs_jupyter" 2>/dev/null || \
	  $(PY) -m pip install -q -c .ci/constraints.txt -e ".[docs]"
	$(PY) tests/bench/tables.py
	$(PY) tests/bench/plot.py
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --site-dir build/site

lint: $(TOOLS) ## check code, format and types with ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

clean: ## remove .venv and caches; runs/ and data/ stay
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info build __pycache__
	find w2v tests -name __pycache__ -type d -prune -exec rm -rf {} +
