# A laptop's shape, for the demo: a minute a run on one CPU core, on data of
# python prepare.py pysource --out_dir=data/demo --tokenizer=bpe:2048 --tokens=3e6
data_dir = "data/demo"
n_layer, n_head, n_embd = 4, 3, 96
block_size = 128
batch_tokens, micro_batch = 1024, 8
max_steps, warmup_steps = 320, 30
learning_rate = 2e-3  # of 1e-3, 2e-3, 4e-3 and 8e-3 the best for each mode of the demo, or within 0.02 of it
eval_every, eval_tokens = 320, 16384
save_every = 160
