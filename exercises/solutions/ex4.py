def neutreno(a, v_n, v_1, lam):
    return a @ v_n + lam * (v_1 - v_n)
