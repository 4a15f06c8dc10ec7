"""The parts of scripts/bench_restart.py: jobs that are killed, the moments of their starts, and plain DCP."""
