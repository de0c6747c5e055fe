#!/usr/bin/env bash
# The whole story on a laptop: Python code becomes four small models. No GPU, no network, 3 min 12 s on two cores of an AMD EPYC.
#
#     make demo                 makes .venv and calls this
#     bash runs/demo.sh all     continues after the samples: losses by domain, attention, pictures, an export
#
# PY=… picks another Python. Stop it at any time: the same command continues where it left off.
set -e
cd "$(dirname "$0")/.."
PY=${PY:-python}
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-1000} # threads that wait awake cost 1.6 x on two busy cores

# Data: the code of this Python's own packages, because it is there already and is about something. 3M tokens of it, in a vocabulary
# of 2,048 that we train on it: a small one leaves the small model its parameters. 51M tokens take 37 s.
"$PY" prepare.py pysource --out_dir=data/demo --tokenizer=bpe:2048 --tokens=3e6

# Train and compare: four modes on the same batches, side by side, a minute a run on one core. One rate and one seed are a look and
# no evidence: the table shows that all learn, and faster than vanilla in the first moments. It draws out/demo/compare.png.
"$PY" compare.py vanilla resformer resformer_lambda svformer config/tiny.py --out_dir=out/demo

# Sample from the newest model, because a loss says little about what it can write: the look of Python, no sense yet.
"$PY" sample.py --prompt="def __init__(self" --max_new_tokens=120

[ "${1:-}" = all ] || exit 0

# Evaluate: the loss by domain over all held-out text, because training looks at 16,384 tokens of each domain only.
"$PY" eval.py out/demo/vanilla* out/demo/svformer* --task=table5

# Analyse: how much attention the first token draws in each layer, and how long its values are. That is what the paper is about.
"$PY" analyze.py out/demo/*/ --chunks=200

# Pictures of it: out/demo/analysis.png.
"$PY" plot.py out/demo/*/

# Export for transformers and lm-eval; needs `pip install transformers==5.23.0`, and it replaces no folder.
"$PY" export.py out/demo/svformer-320-0.002-42
