# The base of results/night: 12.3M tokens on one CPU core in 18 minutes with bf16, an hour or two without, on data of
# python prepare.py pysource --tokenizer=bpe:2048
data_dir = "data/pysource"
n_layer, n_head, n_embd = 6, 4, 128
block_size = 128
batch_tokens, micro_batch = 2048, 16
max_steps, warmup_steps = 6000, 100
learning_rate = 3e-3  # the best of 7.5e-4, 1.5e-3, 3e-3, 6e-3 and 1.2e-2 for vanilla and ResFormer; SVFormer's is 6e-3
eval_every, eval_tokens = 6000, 0
save_every = 500
dtype, compile, attn = "bfloat16", True, "eager"
