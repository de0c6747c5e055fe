# make demo: runs/demo.sh, from real text to samples.
# make test: the suite without what is marked slow. make test-slow: that. make test-all: both.
# make figures: every figure and table of the paper, small.
# make fuzz: 30,000 bad inputs instead of the suite's 1,500. make lint: the style check.
# make notebook: value_residual.ipynb again, with what it puts out now.
# make test-peers: what compares with lm-eval, transformers, peft, trl and ONNX, at the pinned releases, which it installs.
# make test-newest: the same with the newest transformers, peft, trl and ONNX.
# All make .venv on first use. PYTHON=python3.12 picks another interpreter (3.11 or later).
PYTHON ?= python3
ifdef NO_INSTALL
PY := $(PYTHON)
NEWEST := $(PYTHON)
else
PY := .venv/bin/python
NEWEST := .venv/newest/bin/python
endif

# OpenMP threads that wait a long time awake make each other late when anything else runs (1.6 x on 2 busy cores)
export GOMP_SPINCOUNT ?= 1000

RERUN := import nbclient, nbformat; name = "value_residual.ipynb"; \
  notebook = nbclient.execute(nbformat.read(name, 4), record_timing=False, coalesce_streams=True); \
  nbformat.write(notebook, name)

.PHONY: demo figures test test-slow test-all fuzz notebook test-peers test-newest .venv/newest bench-gpu bench-82m bench-468m bench-decoding lint clean
demo: .venv/ready
	PY=$(PY) bash runs/demo.sh

figures: .venv/ready
	$(PY) -m paper.reproduce all

test: .venv/ready-dev
	$(PY) -m pytest tests --numprocesses=auto -m "not slow"

test-slow: .venv/ready-dev
	$(PY) -m pytest tests --numprocesses=auto -m slow

test-all: test test-slow

fuzz: .venv/ready-dev
	FUZZ=30000 $(PY) -m pytest tests/test_bad_input.py --timeout=14400 -s

notebook: .venv/ready-dev
	MPLBACKEND= $(PY) -c '$(RERUN)'

WITH_PEERS := -m pytest --numprocesses=auto tests/test_lm_eval.py tests/test_export.py tests/test_peers.py
test-peers: .venv/ready-peers
	$(PY) $(WITH_PEERS) tests/test_bench.py

test-newest: .venv/newest
	$(NEWEST) $(WITH_PEERS)

# What is to be measured on a GPU. Each line ends within ten minutes and writes its results as they come, into OUT; one that
# fails does not stop the others. NO_INSTALL=1 uses the Python and the packages of the machine: no network is needed.
OUT ?= results
BENCH := $(PY) -m bench.training --device=cuda --block_size=2048
ON := --compile=on --dtype=bfloat16
DECODING := $(PY) -m bench.decoding --device=cuda $(ON) --prompt=1024 --modes=vanilla,svformer --peers=dynamic,static
LLAMAS := --peers=llama,llama_no_mask,llama_our_loss
bench-gpu: bench-82m bench-468m bench-decoding

bench-82m: .venv/ready-peers
	-timeout 380 $(BENCH) $(ON) --shape=82M --micro_batch=32 $(LLAMAS) \
	  --modes=vanilla,resformer,svformer,neutreno,denseformer --out_file=$(OUT)/gpu_train_82m.json
	-timeout 180 $(BENCH) --compile=on --dtype=float16 --shape=82M --micro_batch=32 --modes=vanilla \
	  --out_file=$(OUT)/gpu_train_82m_fp16.json

bench-468m: .venv/ready-peers
	-timeout 420 $(BENCH) $(ON) --shape=468M --micro_batch=8 $(LLAMAS) --modes=vanilla,resformer,svformer \
	  --out_file=$(OUT)/gpu_train_468m.json
	-timeout 150 $(BENCH) $(ON) --shape=468M --micro_batch=16 --modes=vanilla --out_file=$(OUT)/gpu_train_468m_16.json

bench-decoding: .venv/ready-peers
	-timeout 150 $(DECODING) --shape=82M --out_file=$(OUT)/gpu_decode_82m.json
	-timeout 200 $(DECODING) --shape=468M --out_file=$(OUT)/gpu_decode_468m.json
	-timeout 250 $(DECODING) --shape=468M --batch=8 --out_file=$(OUT)/gpu_decode_468m_8.json

lint: .venv/ready-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

clean:
	rm -rf .venv out/demo data/demo

ifdef NO_INSTALL
.venv/ready .venv/ready-dev .venv/ready-peers .venv/newest: ;
else
.venv/ready: requirements.txt constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=...")'
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install -q --disable-pip-version-check -r requirements.txt -c constraints.txt
	touch $@

.venv/ready-dev: .venv/ready requirements-dev.txt
	$(PY) -m pip install -q --disable-pip-version-check -r requirements-dev.txt -c constraints.txt
	touch $@

.venv/ready-peers: .venv/ready-dev requirements-peers.txt
	$(PY) -m pip install -q --disable-pip-version-check -r requirements-peers.txt -c constraints.txt
	touch $@

# On top of .venv, so torch is there once. Each time it looks for newer releases.
.venv/newest: .venv/ready-peers
	$(PY) -m venv $@
	cd $@/lib/python3*/site-packages && ls -d $(CURDIR)/.venv/lib/python3*/site-packages > peers.pth
	$(NEWEST) -m pip install -q --disable-pip-version-check --upgrade 'transformers>=5.24' peft trl onnx onnxruntime
endif
