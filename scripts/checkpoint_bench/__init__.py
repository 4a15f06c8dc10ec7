"""The parts of scripts/bench_checkpoint.py: what is measured, beside what, and how the figures become tables."""
