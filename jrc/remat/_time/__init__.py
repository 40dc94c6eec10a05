"""Seconds of a compiled program: stated by its compiler, or modelled from its text and rates."""
