"""README: the generated parts of README.md, docs/ and benchmarks/README.md."""
