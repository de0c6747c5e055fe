"""Standard parts of networks, from which model.py is built, and which value modes are refused."""
