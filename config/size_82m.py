# The paper's 82M (Table 4): 81,901,056 parameters. Also the default.
n_layer, n_head, n_embd = 8, 8, 512
