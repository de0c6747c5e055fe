#!/usr/bin/env bash
# The paper's 82M on the paper's data: vanilla, ResFormer and SVFormer on 20.97B tokens each, their losses, attention and pictures.
# We have not run it. Hours are computed from the tokens/s that one H200 made (docs/performance.md); nobody has tried 8 GPUs.
#
#     bash runs/paper_82m.sh              on 8 GPUs
#     GPUS=1 bash runs/paper_82m.sh       the same numbers, but for rounding
#
# PY=… picks another Python. After a kill the same command continues from the last checkpoint.
set -e
cd "$(dirname "$0")/.."
PY=${PY:-python}
ON_GPUS=("$PY" -m torch.distributed.run --standalone "--nproc_per_node=${GPUS:-8}")

# Data: 20B tokens of SlimPajama in the mixture of the paper's Table 2, because losses compare on equal text alone. 40 GB, and as
# much again while it runs; two cores read text at 15 MB/s. With a copy on disk add --input_dir=/data/SlimPajama.
"$PY" prepare.py slimpajama

# Train: 10,000 steps of 2,097,152 tokens, the defaults of train.py. One H200 needs 6.1 hours for vanilla at 949,000 tokens/s, 6.2 for
# ResFormer at 943,000, 6.0 for SVFormer at 975,000. Equal seeds give equal batches, so their losses can be subtracted.
"${ON_GPUS[@]}" train.py config/vanilla.py --resume=auto
"${ON_GPUS[@]}" train.py config/resformer.py --resume=auto
"${ON_GPUS[@]}" train.py config/svformer.py --resume=auto

# Compare and evaluate: losses by domain (the paper's mean: 2.7389 for vanilla, 2.7117 for ResFormer), and the six tasks of Table 1. Their
# ± is over documents, paired: it does not say how much another seed would change.
"${ON_GPUS[@]}" eval.py out/vanilla out/resformer out/svformer --task=table5,table1

# Sample, because a loss says little about what a model can write. One row decodes at 1,281 tokens/s on that GPU.
"$PY" sample.py out/resformer --prompt="The first layer's values" --num_samples=3 --compile=true

# Analyse 1,000 chunks of held-out text: does attention spread over more tokens than vanilla's, as Figures 1 and 2 say?
"$PY" analyze.py out/vanilla out/resformer out/svformer

# Training losses minus vanilla's, the paper's main metric: out/relative.png.
"$PY" plot.py relative out/vanilla out/resformer out/svformer

# Pictures of the attention, by layer: out/analysis.png.
"$PY" plot.py out/vanilla out/resformer out/svformer

# Export for transformers and lm-eval; needs `pip install transformers==5.23.0`, and it replaces no folder.
"$PY" export.py out/resformer
