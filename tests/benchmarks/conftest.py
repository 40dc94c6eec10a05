"""The benchmarks are scripts beside each other: tests import them as they import one another."""

import sys

from tests.examples.runs import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
