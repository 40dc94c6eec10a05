"""Run the command line: the exit code, and what an error says in one line."""

import re
import traceback
from collections.abc import Sequence

import jax

from jrc import remat
from jrc.cli._console import print_error
from jrc.cli._load_target import UsageError
from jrc.cli._parser import parser
from jrc.cli._reports import PeakGrew

# The extra of this package that installs a platform.
_EXTRAS = {"cuda": "cuda13", "gpu": "cuda13", "tpu": "tpu"}
# What the errors of functions say, as an option.
_OPTIONS = {
    "has_aux=True": "--has-aux",
    "jrc.plan(loss, ..., reserve=opt_state)": "jrc plan with --reserve",
    "argnums=None of jrc.plan and jrc.explain": "--argnums none",
}


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
        print_error(f"jrc {options.command}: {text}")
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
    text = re.sub(r"^jrc(\.\w+)+: ", "", text)
    for argument, option in _OPTIONS.items():
        text = text.replace(argument, option)
    if isinstance(error, PeakGrew):
        return text
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
        extra = f"Install '.[{_EXTRAS.get(name)}]' in a checkout, or leave"
        extra = extra if name in _EXTRAS else "Leave"
        remedy = f"{extra} the option out for what JAX finds."
        raise UsageError(
            f"--platform must be one that JAX can start here, got {name!r}: {reason}. {remedy}"
        ) from None
