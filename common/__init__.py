"""What the stages share and nobody studies. Imports run downwards: nothing here imports a stage."""
