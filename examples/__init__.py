"""Beside the language models: vit.py, an experiment with the blocks of model.py, and novels.py, English text."""
