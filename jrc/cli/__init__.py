"""The command line: `jrc explain`, `plan`, `largest-batch`, `targets`; also `python -m jrc`."""

from jrc.cli._main import main as main
from jrc.cli._parser import parser as parser
