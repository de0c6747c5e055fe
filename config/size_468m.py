# The paper's 468M (Table 4): 467,921,920 parameters.
n_layer, n_head, n_embd = 24, 16, 1024
micro_batch = 8
