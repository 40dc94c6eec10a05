"""Convergence: where training with compressed gradients ends."""
