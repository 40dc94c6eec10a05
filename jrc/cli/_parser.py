"""The parser of the command line: commands, options and their help."""

import argparse
from collections.abc import Callable
from typing import Any

from jrc._version import __version__
from jrc.cli import _commands

_ABOUT = """\
Report what a gradient saves, and make it fit a memory budget. Nothing is run: functions are traced
and compiled.

TARGET is module:function (the current folder can be imported) or file.py:function. It names a
function that returns (fn, args): fn is the loss, args its arguments, arrays or
jax.ShapeDtypeStruct. --arg passes keyword arguments to it.
"""

_ABOUT_BATCH = """\
Nothing is run: functions are traced and compiled for some batches.

TARGET is module:function (the current folder can be imported) or file.py:function. It names a
function of the batch, a number, that returns (fn, args) for it: fn is the loss, args its arguments,
arrays or jax.ShapeDtypeStruct. The batch is its first argument; --arg passes keyword arguments.
"""
_EXAMPLES = """\
examples:
  # net.py:
  #   def setup(layers=4):
  #       params = jax.eval_shape(init, ...)         # shapes will do
  #       return loss, (params, batch)
  jrc explain net:setup
  jrc explain net:setup --arg layers=12 --plot memory.png --json report.json
  jrc explain net:setup --try-remedies                # what helps, with its bytes and seconds
  jrc explain net:setup --compare net:lean_setup
  jrc explain net:setup --against report.json --tolerance 2%      # for CI: 1 if the peak grew
  jrc explain net:setup --target v5e,h100 --against report.json   # each target with its own
  jrc explain net:step_setup --argnums none           # a whole train step, as it is
  jrc plan net:setup --budget 2GiB --json plan.json
  jrc plan net:setup --budget 2GiB,4GiB,1.0           # one table
  jrc plan models/net.py:setup --budget 0.5           # half way from the least peak to the most
  jrc explain net:setup --platform cpu
  jrc targets                                         # accelerators that need not be there
  jrc plan net:setup --target v5e:2x2 --budget 0.8    # compiled by the TPU's own compiler
  jrc plan net:setup --target h100                    # nine tenths of its memory
  jrc plan net:setup --target h100 --offload          # and the host's memory
  jrc largest-batch net:batch --target h100           # batch(n, layers=4) returns (fn, args)
  jrc largest-batch net:batch --target h100 --offload

A saved plan is applied with jrc.Plan.from_json(text).apply(fn), a saved report is read with
jrc.Report.from_json(text). Exit codes: 0 done, 1 the budget cannot be met or the function failed,
2 the command is wrong.
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, of which `shtab` makes tab completion."""
    parser = argparse.ArgumentParser(
        prog="jrc",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"jrc {__version__}")
    names = "explain | plan | largest-batch | targets"
    commands = parser.add_subparsers(dest="command", required=True, metavar=names)
    explain = _command(
        commands, "explain", "what the gradient saves, re-runs and needs", _commands.explain
    )
    explain.add_argument(
        "--compare",
        metavar="TARGET",
        help="a second function, set beside it; --json report.json then writes report-setup.json "
        "and report-lean.json, by the functions' names, or -1 and -2 where these are equal",
    )
    explain.add_argument(
        "--against",
        metavar="PATH",
        help="a report that --json wrote earlier, set beside this one: the exit code is 1 if the "
        "peak grew by more than --tolerance",
    )
    explain.add_argument(
        "--tolerance",
        metavar="SIZE",
        help="by how much the peak may grow: 2%% (if not given), or bytes, 64MiB",
    )
    explain.add_argument(
        "--plot", metavar="PATH", help="draw live bytes over the program: a .png, .pdf or .svg"
    )
    explain.add_argument(
        "--try-remedies",
        action="store_true",
        help="compile what makes the peak smaller: plans of three sizes, donated arguments",
    )
    plan = _command(
        commands, "plan", "the cheapest recomputation that fits a budget", _commands.plan
    )
    plan.add_argument(
        "--budget",
        metavar="BUDGET[,BUDGET]",
        help="peak bytes: 2000000000, 2e9, 2GiB, 500MB; a share of the baseline's peak, 60%%; or, "
        "written with a point, a fraction "
        "between the least reachable peak (0.0) and that of the baseline (1.0); with "
        "--target it may be left out: nine tenths of a device. Several, as 2GiB,4GiB, give one "
        "table, and with --json plan.json the files plan-2GiB.json and plan-4GiB.json",
    )
    plan.add_argument(
        "--compilations",
        type=int,
        metavar="N",
        help="how many programs may be compiled, 1 to 10; 6 if not given",
    )
    plan.add_argument(
        "--no-verify", action="store_true", help="compile nothing: a guess, which may not fit"
    )
    plan.add_argument(
        "--measure",
        action="store_true",
        help="run the fastest programs that fit, and take the one of the least median",
    )
    plan.add_argument(
        "--cache", metavar="FOLDER", help="read the plan from there, or store it there"
    )
    about = "the largest batch that fits a budget"
    batch = _command(commands, "largest-batch", about, _commands.largest_batch, _ABOUT_BATCH)
    batch.add_argument("--budget", help="peak bytes, as for plan; not a fraction")
    batch.add_argument(
        "--multiple-of", type=int, default=1, metavar="N", help="only batches that N divides"
    )
    batch.add_argument(
        "--most", type=int, default=2**20, metavar="N", help="the largest batch that is looked at"
    )
    for command in (plan, batch):
        command.add_argument(
            "--offload",
            nargs="?",
            const=True,
            default=False,
            type=float,
            metavar="RATE",
            help="values that loops save may be moved to the host's memory; RATE is what copies "
            "reach in bytes per second, 28e9, else what is known of --target",
        )
        command.add_argument(
            "--reserve",
            metavar="BYTES",
            help="what else lies on each device, such as the optimizer's state: 8GiB; it is taken "
            "off the budget",
        )
        command.add_argument(
            "--minimize",
            choices=("time", "flops"),
            default="time",
            help="what a plan has the least of: seconds, or FLOPs",
        )
        command.add_argument(
            "--respect-checkpoints",
            action="store_true",
            help="leave your own jax.checkpoint regions as they are",
        )
    listed = commands.add_parser("targets", help="the accelerators that --target takes")
    listed.add_argument("name", nargs="?", metavar="NAME", help="one of them, with its sources")
    listed.add_argument("--debug", action="store_true", help="show the traceback of an error")
    listed.set_defaults(run=_commands.targets, platform=None, accelerator=None)
    return parser


def _command(
    commands: Any, name: str, about: str, run: Callable[..., None], target: str = _ABOUT
) -> Any:
    command = commands.add_parser(
        name,
        help=about,
        description=f"Show {about}.\n\n{target}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=run)
    command.add_argument("target", metavar="TARGET", help="module:function or file.py:function")
    command.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a keyword argument for TARGET, a Python literal or a word; may be given again",
    )
    command.add_argument(
        "--argnums",
        default="0",
        metavar="N[,N]",
        help="arguments of fn that are differentiated; none for fn as it is, not its gradient",
    )
    command.add_argument("--has-aux", action="store_true", help="fn returns (loss, aux)")
    command.add_argument("--platform", metavar="NAME", help="cpu, cuda or tpu; else what JAX finds")
    command.add_argument(
        "--target",
        dest="accelerator",
        metavar="NAME",
        help="compile for an accelerator that need not be there: v5e:2x2, h100; see jrc targets. "
        "explain takes several, v5e,h100, and writes their reports into one file",
    )
    command.add_argument("--json", metavar="PATH", help="write the result there")
    command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return command
