# A laptop's shape, for the demo: two minutes a run on 2 CPU cores, on data of
# python prepare.py pysource --out_dir=data/demo --tokenizer=bpe:4096 --tokens=8e6
data_dir = "data/demo"
n_layer, n_head, n_embd = 8, 4, 128
block_size = 256
batch_tokens, micro_batch = 2048, 8
max_steps, warmup_steps = 450, 30
learning_rate = 2e-3  # of 1e-3, 2e-3 and 4e-3 the best for each mode of the demo, or within 0.04 of it
eval_every, eval_tokens = 450, 16384
save_every = 150
attn = "eager"  # at this size and on a CPU as fast as sdpa
