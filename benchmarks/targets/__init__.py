"""Targets: what fits on accelerators that need not be there."""
