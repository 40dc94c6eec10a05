"""Texts of compiled programs, as XLA writes them for a CPU, a GPU and a TPU; shortened by hand."""

import pathlib


def compiled_text(name):
    return pathlib.Path(__file__).with_name(f"{name}.hlo").read_text()
