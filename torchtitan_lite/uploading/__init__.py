"""Copies of committed checkpoints in a second folder, mostly in an object store, made behind the run. Without torch."""
