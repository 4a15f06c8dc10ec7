"""A torchtitan-style distributed checkpoint manager for PyTorch."""

__version__ = "0.1.0"
