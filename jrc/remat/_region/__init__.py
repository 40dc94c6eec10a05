"""How a range of equations is recomputed in the backward pass."""
