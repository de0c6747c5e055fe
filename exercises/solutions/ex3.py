def svformer(a, v_n, v_1):
    return a @ v_1


def cache_bytes(n_layer, n_head, head_dim, n_tokens, bytes_per_number):
    tensor = n_head * head_dim * n_tokens * bytes_per_number  # the keys, or the values, of one layer
    return 2 * n_layer * tensor, (n_layer + 1) * tensor  # SVFormer: the keys of all layers, and V_1
