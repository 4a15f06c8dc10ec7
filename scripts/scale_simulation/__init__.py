"""The parts of scripts/simulate_scale.py: plans of many ranks by arithmetic, and what they cost the coordinator."""
