# ResFormer and NeuTRENO together, as in the authors' code: the NeuTRENO term acts on the mixed value.
value_mode = "resformer_neutreno"
