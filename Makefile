# `make` lists the targets. A machine needs Python >= 3.10 and make; everything else goes into .venv.
# With PY=<an interpreter that has the dependencies> no .venv is made: make test PY=python3

PYTHON ?= python3
VENV ?= .venv
CORPUS ?=
# configs/default.yaml is for the small sample; what one brings is taken for a text of text8's kind unless CONFIG says otherwise.
CONFIG ?= $(if $(filter-out enwiki-sample,$(CORPUS)),configs/text8.yaml,configs/default.yaml)
CONFIGS ?= configs/optimizers/*.yaml
SEEDS ?= 1
# How many processes share the tests: one for each core, up to 8; 0 runs them in pytest's own, as a debugger wants it.
JOBS ?= auto
ARGS ?=
OPT ?=
RUN ?= latest

# The stamp is older than what it stands for when what is asked for or a pinned version changes; torch's stands below.
ifdef PY
INSTALLED :=
else
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
endif

.DEFAULT_GOAL := help
.PHONY: help setup train evaluate compare sweep test test-faults test-readme test-gpu sanitize bench bench-cpu bench-transfer bench-train bench-zipf \
  bench-ranks bench-precision smoke docs lint clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo "  variables: CORPUS=text8|path  CONFIG=configs/x.yaml  ARGS='model.window=3 ...'  RUN=runs/x  GPUS=4  PYTHON=python3.x  PY=interpreter"
	@echo "             CONFIGS='configs/optimizers/adam*.yaml'  SEEDS='1 2 3'  OPT=Adamax  JOBS=processes that test"

setup: $(INSTALLED) ## create .venv with pinned packages, and CuPy for the CUDA version that nvidia-smi reports

$(VENV)/.installed: pyproject.toml .ci/constraints.txt Makefile
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; \
	  sys.exit("Python " + v + " is too old; 3.10 or newer is needed: make setup PYTHON=python3.12" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)
	@cuda=$$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA[A-Z ]* Version: *\([0-9][0-9]*\).*/\1/p' | head -n 1); \
	if [ -z "$$cuda" ]; then torch=2.13.0 extras=dev found="no CUDA driver"; \
	elif [ "$$cuda" -ge 13 ]; then torch=2.13.0 extras=dev,cuda13 found="CUDA $$cuda"; \
	elif [ "$$cuda" -eq 12 ]; then torch=2.10.0 extras=dev,cuda12 found="CUDA $$cuda"; \
	else echo "nvidia-smi reports CUDA $$cuda; 12 or newer is needed: update the NVIDIA driver" >&2; exit 1; fi; \
	echo "nvidia-smi reports $$found: installing torch $$torch and .[$$extras]"; \
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check -c .ci/constraints.txt "torch==$$torch" -e ".[plots,tensorboard,$$extras]"
	@touch $@

train: $(INSTALLED) ## train, export and score: CORPUS, CONFIG, ARGS, GPUS=4 (the small Wikipedia sample on one by default)
	$(if $(GPUS),OMP_NUM_THREADS=1 $(PY) -m torch.distributed.run --standalone --nproc-per-node $(GPUS),$(PY)) \
	  train.py $(CONFIG) $(if $(CORPUS),"corpus.path=$(CORPUS)") $(ARGS)

evaluate: $(INSTALLED) ## score a run: RUN (the latest by default)
	$(PY) evaluate.py score $(RUN)

compare: $(INSTALLED) ## train every config of CONFIGS with every seed of SEEDS on CORPUS, and compare them: runs/compare-<date>/
	$(PY) -m w2v.api.compare $(CONFIGS) --base $(CONFIG) --seeds $(SEEDS) --set $(if $(CORPUS),"corpus.path=$(CORPUS)") $(ARGS)

sweep: $(INSTALLED) ## look for an optimizer's best settings: OPT, CORPUS, SEEDS, ARGS='section.key=value,value --lr .02 .04 --batch 32768'
	@test -n "$(OPT)" || { echo "say which: make sweep OPT=Adamax" >&2; exit 2; }
	$(PY) -m w2v.api.sweep $(OPT) --base $(CONFIG) --seeds $(SEEDS) --set $(if $(CORPUS),"corpus.path=$(CORPUS)") $(ARGS)

test: $(INSTALLED) ## run the tests that need no GPU
	CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(PY) -m pytest -q -m "not gpu" -n $(JOBS) --maxprocesses 8 --dist worksteal $(ARGS)

test-faults: $(INSTALLED) ## kill a run 50 times, a rank of two 20 times, and run the programs on 2,000 random inputs; some ten minutes
	CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 W2V_KILLS=50 W2V_RANK_KILLS=20 W2V_CASES=400 $(PY) -m pytest -q -n $(JOBS) --maxprocesses 8 \
	  --dist worksteal tests/faults/test_faults_kill.py tests/faults/test_ranks.py tests/faults/test_faults_random.py $(ARGS)

test-readme: $(INSTALLED) ## run README's make commands as they are printed, in a copy with small texts; some minutes
	OMP_NUM_THREADS=1 W2V_README=1 $(PY) -m pytest -q tests/e2e/test_docs.py -k line_by_line $(ARGS)

test-gpu: $(INSTALLED) ## run the tests that need a GPU
	$(PY) -m pytest -q -rs -m gpu $(ARGS)

# Without torch's cache every tensor is an allocation, whose bounds the checker knows; torch's own kernels are left out. Races can only be
# where memory is shared in a block.
CHECKED := edges or round_as_encode or (test_fused_training and Adam and not (Adamax or AdamW)) or plans_made or (test_cached and planned \
  and not dense) or (twenty_epochs and fused and bf16) or plain_twins or kernel_draws
SANITIZE = PYTORCH_NO_CUDA_MEMORY_CACHING=1 W2V_STRESS_STEPS=1000 \
  compute-sanitizer --error-exitcode 1 --report-api-errors no --kernel-name-exclude kns=native
sanitize: $(INSTALLED) ## check the kernels' memory accesses and races with compute-sanitizer, which comes with CUDA; seven minutes of a GPU
	$(SANITIZE) --tool memcheck $(PY) -m pytest -q -m gpu tests/oracle/test_kernels.py tests/oracle/test_cached.py tests/oracle/test_repeatable.py \
	  tests/unit/test_sampler.py tests/oracle/test_sharded_fused.py -k "$(CHECKED)"
	$(SANITIZE) --tool racecheck $(PY) -m pytest -q -m gpu tests/oracle/test_cached.py tests/oracle/test_kernels.py tests/oracle/test_sharded_fused.py \
	  -k "edges or plans_made or plain_twins or (sharing or stress) and planned"

bench-cpu: $(INSTALLED) ## without a GPU, against gensim, from text to scored vectors: CORPUS, a text file; tests/bench/results.csv
	CUDA_VISIBLE_DEVICES= $(PY) tests/bench/cpu.py --corpus "$(CORPUS)" $(ARGS)

bench-transfer: $(INSTALLED) ## measure moving rows between CPU memory and the GPU; tables, tests/bench/results.csv, docs/transfer.png
	$(PY) tests/bench/transfer.py $(ARGS)

bench-train: SEEDS = 1 2 3
bench-train: CONFIGS = $(addprefix configs/optimizers/,adamax.yaml rmsprop.yaml adam.yaml sgd.yaml)
bench-train: $(INSTALLED) ## whole runs on CORPUS (text8): words/s, scores, link, GPU memory, and the stages of a step; CONFIGS, SEEDS
	$(PY) tests/bench/train.py --corpus $(or $(CORPUS),text8) --configs $(CONFIGS) --engines resident mapped:50% \
	  --precisions float32 bf16 --seeds $(SEEDS) $(ARGS)

bench-zipf: $(INSTALLED) ## train 10 M generated words, GPU memory for a tenth of their rows; 40 GiB of CPU memory
	$(PY) tests/bench/zipf.py $(ARGS)

bench-ranks: $(INSTALLED) ## train 10 M generated words on GPUS=N GPUs with the batch of one; 40 GiB of CPU memory in all
	$(if $(GPUS),$(PY) -m torch.distributed.run --nproc-per-node $(GPUS),$(PY)) tests/bench/ranks.py $(ARGS)

bench-precision: $(INSTALLED) ## batch sizes by precision: time, GPU memory and loss of steps on CORPUS (text8); docs/precision.png
	$(PY) tests/bench/precision.py --corpus $(or $(CORPUS),text8) $(ARGS)

bench: bench-transfer bench-train bench-zipf bench-precision ## bench-transfer, bench-train, bench-zipf and bench-precision, which need a GPU

smoke: $(INSTALLED) ## run train.py and evaluate.py end to end on the CPU, in half a minute, into a folder that is removed
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	$(PY) train.py $(CONFIG) corpus.path=enwiki-sample "corpus.data_dir=$$folder/data" "run.dir=$$folder/runs" \
	  model.vector_size=32 train.epochs=1 train.device=cpu $(ARGS) && \
	$(PY) evaluate.py score "$$folder"/runs/*/

docs: $(INSTALLED) ## write docs/configuration.md from the dataclasses of w2v/config.py
	$(PY) -c "from w2v.config import config_reference; print(config_reference(), end='')" > docs/configuration.md

lint: $(INSTALLED) ## check the code with ruff, and its types with mypy
	$(PY) -m ruff check .
	$(PY) -m mypy

clean: ## remove .venv and caches; runs/ and data/ stay
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info build __pycache__
	find w2v tests -name __pycache__ -type d -prune -exec rm -rf {} +
