# make demo: prepare real text, train three modes on it, compare and sample. make test: the whole suite.
# make figures: every figure and table of the paper, small.
# make test-peers: what compares with lm-eval and transformers, which it installs. make lint: the style check.
# make fuzz, make faults: 30,000 bad inputs; processes killed, disks full and the like (docs/reliability.md).
# All make .venv on first use. PYTHON=python3.12 picks another interpreter (3.11 or later).
PYTHON ?= python3
PY := .venv/bin/python
DEMO := vanilla resformer_lambda svformer

# OpenMP threads that wait a long time awake make each other late when anything else runs (1.6 x on 2 busy cores)
export GOMP_SPINCOUNT ?= 1000

.PHONY: demo figures test test-peers fuzz faults bench-gpu gpu lint clean
demo: .venv/ready
	$(PY) prepare.py pysource --out_dir=data/demo --tokenizer=bpe:4096 --tokens=8e6
	for mode in $(DEMO); do \
	  $(PY) train.py config/tiny.py --value_mode=$$mode --out_dir=out/demo/$$mode --resume=auto || exit; done
	$(PY) plot.py compare $(DEMO:%=out/demo/%) --out_file=out/demo/relative.png
	$(PY) sample.py out/demo/svformer --prompt="def __init__(self" --max_new_tokens=120

figures: .venv/ready
	$(PY) -m paper.reproduce all
	$(PY) -m paper.reproduce report

test: .venv/ready-dev
	OMP_NUM_THREADS=1 $(PY) -m pytest tests --numprocesses=auto --maxprocesses=4

test-peers: .venv/ready-dev
	$(PY) -m pip install -q --disable-pip-version-check -r requirements-peers.txt -c constraints.txt
	OMP_NUM_THREADS=1 $(PY) -m pytest tests/test_lm_eval.py tests/test_bench.py

fuzz: .venv/ready-dev
	OMP_NUM_THREADS=1 $(PY) tests/fuzz.py --out_file=results/fuzz.json

faults: .venv/ready-dev
	$(PY) tests/faults.py --out_file=results/faults.json

# what is to be measured on a GPU: speed and memory of training and decoding, against peers, which it installs
ON_GPU := --device=cuda --compile=on
STEP := --block_size=2048
bench-gpu: .venv/ready-dev
	$(PY) -m pip install -q --disable-pip-version-check -r requirements-peers.txt -c constraints.txt
	$(PY) -m bench.training $(ON_GPU) $(STEP) --micro_batch=32 --dtype=bfloat16 --shape=82M --peers=llama \
	  --modes=vanilla,resformer,svformer,neutreno,denseformer,cross --out_file=results/bench_train_gpu_82m.json
	$(PY) -m bench.training $(ON_GPU) $(STEP) --micro_batch=16 --dtype=bfloat16 --shape=180M \
	  --modes=vanilla,resformer,svformer,denseformer --out_file=results/bench_train_gpu_180m.json
	$(PY) -m bench.training $(ON_GPU) $(STEP) --micro_batch=8 --dtype=bfloat16 --shape=468M --peers=llama \
	  --modes=vanilla,resformer,svformer,denseformer --out_file=results/bench_train_gpu_468m.json
	$(PY) -m bench.training $(ON_GPU) $(STEP) --micro_batch=32 --dtype=bfloat16,float16 --shape=82M \
	  --modes=vanilla --out_file=results/bench_train_gpu_fp16.json
	$(PY) -m bench.training memory $(ON_GPU) $(STEP) --micro_batch=32 --dtype=bfloat16 --shape=82M --peers=llama \
	  --modes=vanilla --recompute=off,on --out_file=results/bench_memory_gpu_82m.json
	$(PY) -m bench.decoding $(ON_GPU) --dtype=bfloat16 --shape=468M --batch=1,8 --prompt=1024 \
	  --modes=vanilla,svformer --peers=dynamic,static --out_file=results/bench_decode_gpu_468m.json
	$(PY) -m bench.decoding $(ON_GPU) --dtype=bfloat16 --shape=82M --batch=1 --prompt=1024 \
	  --modes=vanilla,svformer --peers=dynamic,static --out_file=results/bench_decode_gpu_82m.json

# half an hour of a GPU: the bench, then 82M models at two learning rates; what is finished is not run again
gpu: bench-gpu
	$(PY) -m paper.reproduce all --scale=gpu
	$(PY) -m paper.reproduce report --scale=gpu

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
