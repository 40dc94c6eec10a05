"""Training: recomputation and compression together in one train step."""
