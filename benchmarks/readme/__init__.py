"""README: the generated parts of README.md and benchmarks/README.md."""
