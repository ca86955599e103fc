"""The judge: a trusted referee, and children that hold what is judged. `evaluate.py` is its public face."""
