# SVFormer, Eq 10: U_n = A_n V_1. No value projection and no value cache above layer 1.
value_mode = "svformer"
