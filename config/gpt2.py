# The paper's GPT-2 of Fig 15c: 77,752,320 parameters. torchrun --nproc_per_node=8 train.py config/gpt2.py
arch = "gpt2"
n_layer, n_head, n_embd = 8, 8, 512
