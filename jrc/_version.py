"""The version of jrc, which `pyproject.toml` reads: a checkout that is not installed has it too."""

__version__ = "0.1.0"
