"""The program that is planned: traced, ordered, and told from others."""
