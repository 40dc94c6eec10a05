"""The programs of `benchmarks.pytorch` in PyTorch, with the same parameters and products.

A twin is a function `(run, params, inputs, ...) -> loss`: `run` says how blocks run
(`blocks.Blocks`), `params` are JAX's as nested dictionaries and lists, `inputs` is a list. This
folder imports no JAX.
"""
