# ResFormer, Eq 7: U_n = 1/2 A_n (V_n + V_1). Alone it is the paper's 82M recipe, for 8 GPUs:
# torchrun --nproc_per_node=8 train.py config/resformer.py
value_mode = "resformer"
