#!/usr/bin/env bash
# Does a gap hold in larger models? Vanilla and ResFormer at depths 4, 6, 8 and 12, each at its own best learning rate.
#
#     bash runs/miniseries.sh                                       18 or more runs a depth, on one or more cores or GPUs
#     DEPTHS="4 6" SEEDS=1 bash runs/miniseries.sh --max_steps=500  a first look
#     MODES="vanilla mine.py" bash runs/miniseries.sh --dry_run     another pair; only how long it takes
#
# Depth is the one dial. Width is 16 × depth in heads of 32, and the middle one of three learning rates falls as 1 / width.
# Words behind the script go to compare.py. Stop it at any time: the same command continues where it left off.
set -e
cd "$(dirname "$0")/.."
PY=${PY:-python}

# The same data for all depths: Python code, because it is there already.
"$PY" prepare.py pysource --tokenizer=bpe:2048

for depth in ${DEPTHS:-4 6 8 12}; do
  width=$((16 * depth))
  rates=$(awk "BEGIN { r = 0.384 / $width; printf \"%.3g,%.3g,%.3g\", r / 2, r, r * 2 }")

  # One comparison: its answer, out/miniseries/d<depth>/report, and the runs in the folder beside it.
  echo "depth $depth, width $width, rates $rates" >&2
  "$PY" compare.py ${MODES:-vanilla resformer} config/night.py --n_layer=$depth --n_embd=$width --n_head=$((depth / 2)) \
    --rates=$rates --seeds=${SEEDS:-3} --report --out_dir=out/miniseries/d$depth "$@"
done
