# The Transformer that every variant is compared with.
value_mode = "vanilla"
