# The paper's 180M (Table 4): 179,874,048 parameters.
n_layer, n_head, n_embd = 12, 12, 768
micro_batch = 16
