"""Losses from packages of others, with the recomputation that their authors wrote."""
