"""Checkpointed scans: which carries are saved, and the backward pass over them."""
