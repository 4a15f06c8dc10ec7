"""What a rank of scripts/try_many_ranks.py does, and what is found of a start."""
