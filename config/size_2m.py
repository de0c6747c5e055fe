# The paper's smallest shape (Table 4): 1,623,856 parameters, 99 % of them embeddings.
n_layer, n_head, n_embd = 4, 2, 16
