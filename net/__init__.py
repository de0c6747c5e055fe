"""Standard parts of a network that model.py is built from, and what a value mode cannot mean."""
