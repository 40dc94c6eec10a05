"""Exchanges: how the entries that each replica sends reach the others."""
