def resformer(a, v_n, v_1):
    return a @ (v_n + v_1) / 2
