# NeuTRENO, Eq 8: U_n = A_n V_n + 0.4 (V_1 - V_n).
value_mode = "neutreno"
