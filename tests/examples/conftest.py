"""The examples import one another by file name, and so do their tests."""

import sys

from tests.examples.runs import ROOT

sys.path.insert(0, str(ROOT / "examples"))
