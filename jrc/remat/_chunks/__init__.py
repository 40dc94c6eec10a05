"""A function in chunks along an independent axis."""
