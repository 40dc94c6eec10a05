"""The command line: `jrc explain`, `plan`, `largest-batch`, `targets`; also `python -m jrc`."""

import argparse
import json
import pathlib
import re
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jrc import remat
from jrc._cli_options import budget_of, check_paths, gradient_options
from jrc._cli_plans import path_for, plans_table
from jrc._cli_target import UsageError, load
from jrc._errors import name_of
from jrc._targets import target as target_named
from jrc._targets import targets as all_targets

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

# The extra of this package that installs a platform.
_EXTRAS = {"cuda": "cuda13", "gpu": "cuda13", "tpu": "tpu"}

_EXAMPLES = """\
examples:
  # net.py:
  #   def setup(layers=4):
  #       params = jax.eval_shape(init, ...)         # shapes will do
  #       return loss, (params, batch)
  jrc explain net:setup
  jrc explain net:setup --arg layers=12 --plot memory.png --json report.json
  jrc explain net:setup --compare net:lean_setup
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The arguments behind the program's name; those of the process by default.

    Returns:
        The exit code: 0, 1 if the budget cannot be met or the function fails, 2 if the command is
        wrong.
    """
    shell = parser()
    options = shell.parse_args(argv)
    if getattr(options, "budget", "") is None and options.accelerator is None:
        shell.error("--budget must be given, or --target, of whose memory it is nine tenths then")
    options.failures = []
    try:
        _use_platform(options.platform, options.accelerator)
        options.run(options)
    except Exception as error:
        if options.debug:
            traceback.print_exc()
        code = _exit_code(error, options.failures)
        text = _one_line(error, code)
        Console(stderr=True, soft_wrap=True, emoji=False).print(
            f"jrc {options.command}: {text}", markup=False, highlight=False
        )
        return code
    return 0


def _exit_code(error: Exception, failures: Sequence[BaseException]) -> int:
    """Return 2 for an error in the command, 1 for one of the user's function or the budget.

    Args:
        error: What was raised.
        failures: What the user's own code raised.
    """
    if isinstance(error, UsageError):
        return 2
    if isinstance(error, remat.BudgetError) or any(error is failure for failure in failures):
        return 1
    # jrc checks its arguments, which come from the options and from what TARGET returned.
    return 2 if isinstance(error, TypeError | ValueError) else 1


def _one_line(error: Exception, code: int) -> str:
    """Return the text of an error on one line, in the words of the command line."""
    text = " ".join(str(error).split())
    # The command prints its own name, and its options are not arguments.
    text = re.sub(r"^jrc\.\w+: ", "", text).replace("has_aux=True", "--has-aux")
    if isinstance(error, remat.BudgetError):
        known = f"{error.least_bytes:,}" in text or str(error.least_bytes) in text
        return text if known else f"{text} The least is {error.least_bytes:,} bytes."
    return text if code == 2 else f"{type(error).__name__}: {text} (--debug shows where)"


def _use_platform(name: str | None, accelerator: str | None = None) -> None:
    """Set JAX's platform and see that it starts; the CPU where a target is compiled for."""
    if name is None and accelerator is None:
        return
    name = name or "cpu"
    jax.config.update("jax_platforms", name)
    try:
        jax.devices()
    except Exception as error:  # JAX raises an AssertionError for a plugin that is not installed
        reason = " ".join(str(error).split()) or "its plugin is not installed"
        extra = f"Install 'jrc[{_EXTRAS[name]}]', or leave" if name in _EXTRAS else "Leave"
        remedy = f"{extra} the option out for what JAX finds."
        raise UsageError(
            f"--platform must be one that JAX can start here, got {name!r}: {reason}. {remedy}"
        ) from None


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, of which `shtab` makes tab completion."""
    parser = argparse.ArgumentParser(
        prog="jrc",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"jrc {version('jrc')}")
    names = "explain | plan | largest-batch | targets"
    commands = parser.add_subparsers(dest="command", required=True, metavar=names)
    explain = _command(commands, "explain", "what the gradient saves, re-runs and needs", _explain)
    explain.add_argument(
        "--compare",
        metavar="TARGET",
        help="a second function, set beside it; --json report.json then writes report-setup.json "
        "and report-lean.json, by the functions' names, or -1 and -2 where these are equal",
    )
    explain.add_argument(
        "--plot", metavar="PATH", help="draw live bytes over the program: a .png, .pdf or .svg"
    )
    plan = _command(commands, "plan", "the cheapest recomputation that fits a budget", _plan)
    plan.add_argument(
        "--budget",
        metavar="BUDGET[,BUDGET]",
        help="peak bytes: 2000000000, 2e9, 2GiB, 500MB; or, written with a point, a fraction "
        "between the least reachable peak (0.0) and that of the baseline (1.0); with "
        "--target it may be left out: nine tenths of a device. Several, as 2GiB,4GiB, give one "
        "table, and with --json plan.json the files plan-2GiB.json and plan-4GiB.json",
    )
    plan.add_argument(
        "--compilations",
        type=int,
        metavar="N",
        help="how many programs may be compiled, 1 to 10; 5 if not given, 3 with --target",
    )
    plan.add_argument(
        "--no-verify", action="store_true", help="compile nothing: a guess, which may not fit"
    )
    plan.add_argument(
        "--cache", metavar="FOLDER", help="read the plan from there, or store it there"
    )
    about = "the largest batch that fits a budget"
    batch = _command(commands, "largest-batch", about, _largest_batch, _ABOUT_BATCH)
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
            "--respect-checkpoints",
            action="store_true",
            help="leave your own jax.checkpoint regions as they are",
        )
    listed = commands.add_parser("targets", help="the accelerators that --target takes")
    listed.add_argument("name", nargs="?", metavar="NAME", help="one of them, with its sources")
    listed.add_argument("--debug", action="store_true", help="show the traceback of an error")
    listed.set_defaults(run=_targets, platform=None, accelerator=None)
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
        "--argnums", default="0", metavar="N[,N]", help="arguments of fn that are differentiated"
    )
    command.add_argument("--has-aux", action="store_true", help="fn returns (loss, aux)")
    command.add_argument("--platform", metavar="NAME", help="cpu, cuda or tpu; else what JAX finds")
    command.add_argument(
        "--target",
        dest="accelerator",
        metavar="NAME",
        help="compile for an accelerator that need not be there: v5e:2x2, h100; see jrc targets",
    )
    command.add_argument("--json", metavar="PATH", help="write the result there")
    command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return command


def _explain(options: argparse.Namespace) -> None:
    asked = gradient_options(options)
    targets = [options.target, *([options.compare] if options.compare else [])]
    paths = _report_paths(options.json, targets)
    for path in paths:
        check_paths(path, options.plot)
    reports = [_report(target, options, asked) for target in targets]
    texts = [str(report) for report in reports]
    if options.compare:
        texts = [f"{name}: {text}" for name, text in zip(_names(targets), texts, strict=True)]
        texts.append(reports[0].compare(reports[1], names=_names(targets)))
    _print("\n\n".join(texts))
    for path, report in zip(paths, reports, strict=True):
        if path:
            _write(path, report.to_json())
    if options.plot:
        reports[0].plot(options.plot, *reports[1:], names=_names(targets))


def _report_paths(path: str | None, targets: Sequence[str]) -> list[str | None]:
    """Return the file of each report: with --compare, --json report.json is report-setup.json."""
    if len(targets) == 1:
        return [path]
    short = [target.rpartition(":")[2] for target in targets]
    same = len(set(short)) < len(short)
    return [path_for(path, f"{i}" if same else name) for i, name in enumerate(short, 1)]


def _report(name: str, options: argparse.Namespace, asked: dict[str, Any]) -> Any:
    target = load(name, options.arg, options.failures)
    return remat.explain(target.fn, *target.args, **asked)


def _plan(options: argparse.Namespace) -> None:
    asked = gradient_options(options) | {"verify": not options.no_verify}
    asked |= {"respect_checkpoints": options.respect_checkpoints, "cache": options.cache}
    asked |= {"offload": options.offload}
    if options.compilations is not None:
        asked["compilations"] = options.compilations
    if options.budget and "," in options.budget:
        _plans(options, [text.strip() for text in options.budget.split(",")], asked)
        return
    asked["budget"] = budget_of(options.budget)
    check_paths(options.json)
    target = load(options.target, options.arg, options.failures)
    plan = remat.plan(target.fn, *target.args, **asked)
    _print(str(plan))
    if options.json:
        _write(options.json, plan.to_json())


def _plans(options: argparse.Namespace, texts: Sequence[str], asked: dict[str, Any]) -> None:
    """Print one table of the plans for several budgets, and write a file for each.

    Raises:
        BudgetError: Behind the table, for the first budget that no plan fits.
    """
    # Checked before anything is traced.
    budgets = [remat.checked_budget(budget_of(text), "jrc.plan") for text in texts]
    paths = [path_for(options.json, text) for text in texts]
    for path in paths:
        check_paths(path)
    target = load(options.target, options.arg, options.failures)
    plans = remat.plan_for_each(target.fn, *target.args, budgets=budgets, **asked)
    _print(plans_table(texts, plans))
    for path, plan in zip(paths, plans, strict=True):
        if path and isinstance(plan, remat.Plan):
            _write(path, plan.to_json())
    if errors := [plan for plan in plans if isinstance(plan, remat.BudgetError)]:
        raise errors[0]


def _largest_batch(options: argparse.Namespace) -> None:
    """TARGET is called with each batch, and returns `(fn, args)` for it."""
    asked = gradient_options(options) | {"budget": budget_of(options.budget)}
    asked |= {"multiple_of": options.multiple_of, "most": options.most}
    asked |= {"respect_checkpoints": options.respect_checkpoints, "offload": options.offload}
    check_paths(options.json)

    made: dict[Any, Callable[..., Any]] = {}

    def make_args(batch: int) -> tuple[Any, ...]:
        target = load(options.target, options.arg, options.failures, batch)
        made[_shapes(target.args)] = target.fn
        return target.args

    def fn(*args: Any) -> Any:
        """The function of the batch that the arguments are of: it may close over its size."""
        return made[_shapes(args)](*args)

    make_args(options.multiple_of)
    (first,) = made.values()
    fn.__name__ = name_of(first)
    found = remat.largest_batch(make_args, fn, **asked)
    _print(str(found))
    if options.json:
        plan = None if found.plan is None else json.loads(found.plan.to_json())
        _write(options.json, json.dumps(found._asdict() | {"plan": plan}))


def _shapes(args: tuple[Any, ...]) -> Any:
    """Return what tells the arguments of one batch from those of another."""
    leaves, treedef = jax.tree.flatten(args)
    return treedef, tuple(np.shape(leaf) for leaf in leaves)


def _targets(options: argparse.Namespace) -> None:
    _print(str(all_targets() if options.name is None else target_named(options.name)))


def _names(targets: Sequence[str]) -> list[str]:
    """Return the functions' names, or whole targets if two names are the same."""
    short = [target.rpartition(":")[2] for target in targets]
    return short if len(set(short)) == len(short) else list(targets)


def _write(path: str, text: str) -> None:
    try:
        pathlib.Path(path).write_text(text + "\n")
    except OSError as error:
        raise UsageError(
            f"--json must be a path that can be written, got {path}: {error.strerror}."
        ) from None


def _print(text: str) -> None:
    Console(soft_wrap=True, emoji=False).print(text, markup=False, highlight=False)
