"""The command line: `jrc explain` and `jrc plan`; `python -m jrc` is the same."""

import argparse
import ast
import importlib
import importlib.util
import pathlib
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from rich.console import Console

from jrc import remat
from jrc._errors import close_to, listed
from jrc._progress import shown_meanwhile

_ABOUT = """\
See what a gradient keeps, and make it fit a memory budget. Nothing is run: functions are traced
and compiled.

TARGET is module:function (the current folder can be imported) or file.py:function. It names a
function that returns (fn, args): fn is the loss, args its arguments, arrays or
jax.ShapeDtypeStruct. --arg passes keyword arguments to it.
"""

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
  jrc plan models/net.py:setup --budget 0.5           # half way from the least peak to the most

A saved plan is applied with jrc.Plan.from_json(text).apply(fn), a saved report is read with
jrc.Report.from_json(text). Exit codes: 0 done, 1 the budget cannot be met or the function failed,
2 the command is wrong.
"""


class UsageError(Exception):
    """The command cannot be done as it was given."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The arguments behind the program's name; those of the process by default.

    Returns:
        The exit code: 0, 1 if the budget cannot be met or the function fails, 2 if the command is
        wrong.
    """
    options = _parser().parse_args(argv)
    try:
        options.run(options)
    except Exception as error:
        if options.debug:
            traceback.print_exc()
        text, code = _in_one_line(error)
        Console(stderr=True, soft_wrap=True).print(
            f"jrc {options.command}: {text}", markup=False, highlight=False
        )
        return code
    return 0


def _in_one_line(error: Exception) -> tuple[str, int]:
    """What went wrong, and the exit code that says whose fault it is."""
    said = " ".join(str(error).split())
    ours = re.match(r"jrc\.\w+: ", said)
    # The command says its name itself, and its options are not arguments.
    said = said.removeprefix(ours[0] if ours else "").replace("has_aux=True", "--has-aux")
    if isinstance(error, UsageError):
        return said, 2
    if type(error).__name__ == "BudgetError":
        least = getattr(error, "least_bytes", None)
        is_said = least is None or f"{least:,}" in said or str(least) in said
        return said if is_said else f"{said} The least is {least:,} bytes.", 1
    if isinstance(error, TypeError | ValueError) and ours:
        return said, 2
    return f"{type(error).__name__}: {said} (--debug shows where)", 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jrc",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="explain | plan")
    explain = _command(
        commands, "explain", "what the gradient keeps, runs again and needs", _explain
    )
    explain.add_argument("--compare", metavar="TARGET", help="a second function, set beside it")
    explain.add_argument(
        "--plot", metavar="PATH", help="draw live bytes over the program: a .png, .pdf or .svg"
    )
    plan = _command(commands, "plan", "the cheapest recomputation that fits a budget", _plan)
    plan.add_argument(
        "--budget",
        required=True,
        help="peak bytes: 2000000000, 2e9, 2GiB, 500MB; or, written with a point, a fraction "
        "between the least reachable peak (0.0) and the peak with nothing re-run (1.0)",
    )
    plan.add_argument(
        "--compilations",
        type=int,
        metavar="N",
        help="how many programs may be compiled, 1 to 10; 5 if not given",
    )
    plan.add_argument(
        "--no-verify", action="store_true", help="compile nothing: a guess, which may not fit"
    )
    return parser


def _command(commands: Any, name: str, about: str, run: Callable[..., None]) -> Any:
    command = commands.add_parser(
        name,
        help=about,
        description=f"Show {about}.\n\n{_ABOUT}",
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
    command.add_argument("--json", metavar="PATH", help="write the result there")
    command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return command


def _explain(options: argparse.Namespace) -> None:
    asked = _gradient_options(options)
    _check_paths(options.json, options.plot)
    targets = [options.target, *([options.compare] if options.compare else [])]
    reports = [_report(target, options.arg, asked) for target in targets]
    texts = [str(report) for report in reports]
    if options.compare:
        texts.append(reports[0].compare(reports[1], names=_names(targets)))
    _print("\n\n".join(texts))
    if options.json:
        _write(options.json, reports[0].to_json())
    if options.plot:
        reports[0].plot(options.plot, *reports[1:], names=_names(targets))


def _report(target: str, settings: Sequence[str], asked: dict[str, Any]) -> Any:
    fn, args = _load(target, settings)
    return remat.explain(fn, *args, **asked)


def _plan(options: argparse.Namespace) -> None:
    asked = _gradient_options(options)
    asked |= {"budget": _budget(options.budget), "verify": not options.no_verify}
    if options.compilations is not None:
        asked["compilations"] = options.compilations
    _check_paths(options.json)
    fn, args = _load(options.target, options.arg)
    with shown_meanwhile("jrc.plan: tracing and solving"):
        plan = remat.plan(fn, *args, **asked)
    _print(str(plan))
    if options.json:
        _write(options.json, plan.to_json())


def _gradient_options(options: argparse.Namespace) -> dict[str, Any]:
    try:
        numbers = tuple(int(n) for n in options.argnums.split(","))
    except ValueError:
        raise UsageError(
            f"--argnums is a position or several, such as 0 or 0,2; got {options.argnums!r}."
        ) from None
    argnums = numbers[0] if len(numbers) == 1 else numbers
    return {"argnums": argnums, "has_aux": options.has_aux}


def _budget(text: str) -> int | float | str:
    """Bytes, or a fraction where the number has a point: `2e9` is a number of bytes."""
    if text in ("0", "1"):
        raise UsageError(f"--budget {text} is a number of bytes; the fraction is {text}.0.")
    if re.search(r"[\d.][eE]\+?\d", text):
        return text
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _check_paths(json: str | None, plot: str | None = None) -> None:
    """See that the results can be written, before the work of hours."""
    try:
        if json is not None:
            remat.check_writable(json, "--json")
        if plot is not None:
            remat.check_picture(plot, "--plot")
    except (ImportError, OSError, ValueError) as error:
        raise UsageError(str(error)) from None


def _load(target: str, settings: Sequence[str]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function to look at and its arguments, from what TARGET names."""
    where, colon, name = target.rpartition(":")
    if not (colon and where and name):
        raise UsageError(
            f"a target is module:function or file.py:function; got {target!r}. "
            "Write for instance net:setup."
        )
    module = _module(where)
    setup = getattr(module, name, None)
    if not callable(setup):
        known = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        raise UsageError(
            f"{where} has no function {name!r}{close_to(name, known)}; it has "
            f"{listed(sorted(known))}."
        )
    given = setup(**dict(map(_setting, settings)))
    if not (isinstance(given, tuple) and len(given) == 2 and callable(given[0])) or not isinstance(
        given[1], tuple | list
    ):
        raise UsageError(
            f"{target} must return (fn, args), a function and the tuple of its arguments; it "
            f"returned {_described(given)}. For one argument write `return fn, (x,)`."
        )
    return given[0], tuple(given[1])


def _described(given: Any) -> str:
    """What a target returned: `int`, `(function, Array)`."""
    if not isinstance(given, tuple):
        return type(given).__name__
    return f"({', '.join(type(each).__name__ for each in given)})"


def _module(where: str) -> ModuleType:
    path = pathlib.Path(where)
    if path.suffix != ".py":
        _importable(pathlib.Path.cwd())
        missing = UsageError(
            f"there is no module {where!r} in {pathlib.Path.cwd()} or installed. Change to "
            "its folder, or give the path of a .py file."
        )
        if where.startswith("."):
            raise missing
        try:
            return importlib.import_module(where)
        except ModuleNotFoundError as error:
            # One that the user's own module lacks is told as it is.
            if error.name is None or not f"{where}.".startswith(f"{error.name}."):
                raise
            raise missing from None
    if not path.is_file():
        raise UsageError(
            f"there is no file {where!r} in {pathlib.Path.cwd()}. Give the path from there."
        )
    _importable(path.resolve().parent)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{where!r} cannot be imported as Python.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _importable(folder: pathlib.Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not (equals and key.isidentifier()):
        raise UsageError(f"--arg is KEY=VALUE, such as layers=12; got {text!r}.")
    try:
        return key, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        if re.fullmatch(r"[A-Za-z_][\w.-]*", value):
            return key, value
        raise UsageError(
            f"--arg {key}= takes a Python literal or a word; got {value!r}. Quote text in the "
            "shell: --arg 'text=\"two words\"'."
        ) from None


def _names(targets: Sequence[str]) -> list[str]:
    """The functions' names, or all of the targets where these are the same."""
    short = [target.rpartition(":")[2] for target in targets]
    return short if len(set(short)) == len(short) else list(targets)


def _write(path: str, text: str) -> None:
    try:
        pathlib.Path(path).write_text(text + "\n")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}.") from None


def _print(text: str) -> None:
    Console(soft_wrap=True).print(text, markup=False, highlight=False)
