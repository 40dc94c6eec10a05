"""The options of benchmarks that plan many programs and compare plans with ways by hand."""

import argparse
import pathlib
from collections.abc import Iterable

from benchmarks._lib.command import names_of


def add_plan_options(
    parser: argparse.ArgumentParser, names: Iterable[str], aims: Iterable[str]
) -> None:
    """Add which programs are planned, by what, and for which accelerator."""
    names, aims = list(names), list(aims)
    add = parser.add_argument
    add("--models", type=names_of(names), default=names, help="default: all")
    add("--minimize", type=names_of(aims), default=aims, help=f"default: {','.join(aims)}")
    add("--target", default="", help="an accelerator that need not be there, such as h100")
    add("--resume", action="store_true", help="leave rows alone that --out has")
    add("--cache", type=pathlib.Path, help="folder for what XLA states of programs")
