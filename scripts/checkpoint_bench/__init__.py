"""The parts of scripts/bench_checkpoint.py: the contenders, the measurements and the tables."""
