"""Checkpointed scans: the schedule of saved carries, and the backward pass over them."""
