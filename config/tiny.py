# A laptop's shape, for the demo: about a minute a run on 2 CPU cores, on data of
# python prepare.py pysource --out_dir=data/demo --tokenizer=bpe:4096 --tokens=8e6
data_dir = "data/demo"
n_layer, n_head, n_embd = 8, 4, 128
block_size = 256
batch_tokens, micro_batch = 1024, 4
max_steps, warmup_steps = 300, 20
learning_rate = 2e-3  # small models take a higher rate than the 82M
eval_every, eval_tokens = 300, 8192
save_every = 150
