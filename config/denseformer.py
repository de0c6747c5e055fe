# DenseFormer: a learned average over depth after every block (dilation 1, period 1).
value_mode = "denseformer"
