"""Benchmarks are no part of the package: their tests run where benchmarks do, in `.ci/run`."""

import pathlib

import pytest

HERE = pathlib.Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker("slow")
