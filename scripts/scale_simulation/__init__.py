"""The parts of scripts/simulate_scale.py: plans of many ranks by arithmetic, and their cost on the coordinator."""
