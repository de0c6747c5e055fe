# A shape at which all modes, three seeds each, train in an hour on 2 CPU cores (make modes), on data of
# python prepare.py pysource --out_dir=data/small --tokenizer=bpe:2048 --tokens=12e6
data_dir = "data/small"
n_layer, n_head, n_embd = 8, 8, 64
block_size = 64
batch_tokens, micro_batch = 1024, 16
max_steps, warmup_steps = 300, 20
learning_rate = 3e-3
eval_every, eval_tokens = 300, 8192
save_every, log_every = 300, 100
dtype = "float32"  # products this small gain nothing from bf16
