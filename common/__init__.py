"""What the stages share, to look up more than to study. Imports run downwards: nothing here imports a stage."""
