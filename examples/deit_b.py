# DeiT-B: 86,567,656 parameters for 1,000 classes, as published, with its batch, rate and schedule, but without its
# augmentation and regularization: python examples/vit.py examples/deit_b.py --data_dir=imagenet
image_size, patch = 224, 16
n_layer, n_head, n_embd = 12, 12, 768
init_std = 0.02
batch_size, learning_rate = 1024, 1e-3
epochs, warmup_epochs = 300, 5
