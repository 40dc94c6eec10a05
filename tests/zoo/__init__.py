"""Small models from packages, and programs with shared values, for `jrc.plan` and `jrc.explain`."""
