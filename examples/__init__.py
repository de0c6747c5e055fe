"""Experiments beside the language models, with the blocks of model.py: vit.py."""
