"""flax linen and nnx modules as recomputed regions."""
