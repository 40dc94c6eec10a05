"""The models that several benchmarks differentiate, and recomputation of them by hand."""
