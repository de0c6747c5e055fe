# make demo: prepare real text, train three modes on it, compare and sample. make modes: all modes, three seeds, small.
# make figures: every figure and table of the paper, small, and report.html of them.
# make test: the whole suite. make test-peers: the part that compares with lm-eval and transformers, which it installs.
# All make .venv on first use. PYTHON=python3.12 picks another interpreter (3.11 or later).
PYTHON ?= python3
PY := .venv/bin/python
MODES := vanilla resformer svformer
RUNS := $(MODES:%=out/demo/%)

# OpenMP threads that wait a long time awake make each other late when anything else runs (1.6 x on 2 busy cores)
export GOMP_SPINCOUNT ?= 1000

# every row of the table of modes, and the paper's sweeps of λ (Figures 8 and 22), as one run for each seed
SWEEP = $(shell $(PY) model.py table | sed -n 's/^| `\([a-z0-9_]*\)`.*/\1/p') \
        $(addprefix resformer_lambda_,0.2 0.5 0.8 1 5) $(addprefix neutreno_,0.2 0.6 0.8)
SEEDS := 42 1 2

.PHONY: demo modes figures test test-peers lint clean
demo: .venv/ready
	$(PY) prepare.py pysource --out_dir=data/demo --tokenizer=bpe:4096 --tokens=16e6
	for mode in $(MODES); do \
	  $(PY) train.py config/tiny.py config/$$mode.py --out_dir=out/demo/$$mode --resume=auto || exit; done
	$(PY) plot.py compare $(RUNS) --window=10 --out_file=out/demo/relative.png --json_file=out/demo/compare.json
	$(PY) sample.py out/demo/resformer --prompt="def __init__(self" --max_new_tokens=120

modes: .venv/ready
	$(PY) prepare.py pysource --out_dir=data/small --tokenizer=bpe:2048 --tokens=12e6
	for seed in $(SEEDS); do for mode in $(SWEEP); do echo $$mode $$seed; done; done | \
	OMP_NUM_THREADS=1 xargs -P 2 -L 1 sh -c '$(PY) train.py config/small.py --value_mode=$$0 --seed=$$1 \
	  --out_dir=out/modes/$$0-$$1 --resume=auto --keep=1 || exit 255'
	$(PY) plot.py ablations out/modes/*-* --out_file=out/modes/ablations.png --json_file=out/modes/ablations.json

figures: .venv/ready
	$(PY) reproduce.py all
	$(PY) reproduce.py report

test: .venv/ready-dev
	OMP_NUM_THREADS=1 $(PY) -m pytest tests --numprocesses=auto --maxprocesses=4

test-peers: .venv/ready-dev
	$(PY) -m pip install -q --disable-pip-version-check -r requirements-peers.txt -c constraints.txt
	OMP_NUM_THREADS=1 $(PY) -m pytest tests/test_lm_eval.py tests/test_bench.py

lint: .venv/ready-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

clean:
	rm -rf .venv out/demo data/demo

.venv/ready: requirements.txt constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=...")'
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install -q --disable-pip-version-check -r requirements.txt -c constraints.txt
	touch $@

.venv/ready-dev: .venv/ready requirements-dev.txt
	$(PY) -m pip install -q --disable-pip-version-check -r requirements-dev.txt -c constraints.txt
	touch $@
