"""What each command does: read its options, call jrc, print and write the result."""

import argparse
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jrc import remat
from jrc._errors import name_of, public
from jrc._targets import target as target_named
from jrc._targets import targets as all_targets
from jrc.cli._console import print_text
from jrc.cli._load_target import UsageError, load
from jrc.cli._options import (
    budget_of,
    check_paths,
    differentiated,
    gradient_options,
    target_option,
    targets_of,
    tolerance_of,
)
from jrc.cli._plans_table import path_for, plans_table
from jrc.cli._reports import check_bases, read_base, refuse_growth, reports_text


def explain(options: argparse.Namespace) -> None:
    """Print a report of a function, of two functions, or of one for each of several targets."""
    asked, targets = differentiated(options), targets_of(options)
    asked |= {"try_remedies": options.try_remedies}
    if options.compare and len(targets) > 1:
        raise UsageError(
            f"--compare must go with one --target, got {', '.join(targets)}. Leave out all but one."
        )
    grown_by = tolerance_of(options.tolerance, options.against)
    bases = read_base(options.against, targets) if options.against else []
    functions = [options.target, *([options.compare] if options.compare else [])]
    paths = _report_paths(options.json, functions)
    for path in paths:
        check_paths(path, options.plot)
    reports = _reports(functions, targets, options, asked)
    if options.against:
        check_bases(reports[: len(bases)], bases, options.against)
    names = targets if len(targets) > 1 else _names(functions)
    texts = [str(report) for report in reports]
    if options.compare:
        texts = [f"{name}: {text}" for name, text in zip(names, texts, strict=True)]
        texts.append(reports[0].compare(reports[1], names=names))
    print_text("\n\n".join(texts))
    if len(targets) > 1:
        stored = [reports_text(dict(zip(targets, reports, strict=True)))]
    else:
        stored = [report.to_json() for report in reports]
    for path, text in zip(paths, stored, strict=True):
        if path:
            _write(path, text)
    if options.plot:
        reports[0].plot(options.plot, *reports[1:], names=names)
    if options.against:
        refuse_growth(reports[: len(bases)], bases, targets, grown_by, options.against)


def _reports(
    functions: Sequence[str],
    targets: Sequence[str],
    options: argparse.Namespace,
    asked: dict[str, Any],
) -> list[remat.Report]:
    """Return the report of each function, or of one function for each target."""
    # A compiler that is not installed is told before anything is traced.
    places = [target_option(name) for name in targets] or [{}]
    loaded = [load(name, options.arg, options.failures) for name in functions]
    return [remat.explain(x.fn, *x.args, **asked, **place) for x in loaded for place in places]


def _report_paths(path: str | None, functions: Sequence[str]) -> list[str | None]:
    """Return the file of each report: with --compare, --json report.json is report-setup.json."""
    if len(functions) == 1:
        return [path]
    short = [function.rpartition(":")[2] for function in functions]
    same = len(set(short)) < len(short)
    return [path_for(path, f"{i}" if same else name) for i, name in enumerate(short, 1)]


def plan(options: argparse.Namespace) -> None:
    """Print the plan for a budget, or one table for several budgets."""
    asked = gradient_options(options) | {"verify": not options.no_verify}
    asked |= {"respect_checkpoints": options.respect_checkpoints, "cache": options.cache}
    asked |= {"offload": options.offload, "minimize": options.minimize}
    asked |= {"measure": options.measure, "reserve": options.reserve}
    if options.compilations is not None:
        asked["compilations"] = options.compilations
    if options.budget and "," in options.budget:
        _plans(options, [text.strip() for text in options.budget.split(",")], asked)
        return
    asked["budget"] = budget_of(options.budget)
    check_paths(options.json)
    target = load(options.target, options.arg, options.failures)
    plan = remat.plan(target.fn, *target.args, **asked)
    print_text(str(plan))
    if options.json:
        _write(options.json, plan.to_json())


def _plans(options: argparse.Namespace, texts: Sequence[str], asked: dict[str, Any]) -> None:
    """Print one table of the plans for several budgets, and write a file for each.

    Raises:
        BudgetError: Behind the table, for the first budget that no plan fits.
    """
    # Checked before anything is traced.
    with public("jrc.plan"):
        budgets = [budget_of(text) for text in texts]
        for budget in budgets:
            remat.checked_budget(budget)
    paths = [path_for(options.json, text) for text in texts]
    for path in paths:
        check_paths(path)
    target = load(options.target, options.arg, options.failures)
    plans = remat.plan_for_each(target.fn, *target.args, budgets=budgets, **asked)
    print_text(plans_table(texts, plans))
    for path, plan in zip(paths, plans, strict=True):
        if path and isinstance(plan, remat.Plan):
            _write(path, plan.to_json())
    if errors := [plan for plan in plans if isinstance(plan, remat.BudgetError)]:
        raise errors[0]


def largest_batch(options: argparse.Namespace) -> None:
    """Print the largest batch that fits; TARGET returns `(fn, args)` of each batch.

    Raises:
        BudgetError: None fits.
    """
    asked = gradient_options(options) | {"budget": budget_of(options.budget)}
    asked |= {"multiple_of": options.multiple_of, "most": options.most}
    asked |= {"respect_checkpoints": options.respect_checkpoints, "offload": options.offload}
    asked |= {"minimize": options.minimize, "reserve": options.reserve}
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
    if found.plan is not None:
        print_text(str(found))
    if options.json:
        plan = None if found.plan is None else json.loads(found.plan.to_json())
        fastest = found.fastest and found.fastest._asdict()
        _write(options.json, json.dumps(found._asdict() | {"plan": plan, "fastest": fastest}))
    if found.plan is None:
        raise remat.BudgetError(str(found), found.least_bytes)


def _shapes(args: tuple[Any, ...]) -> Any:
    """Return what tells the arguments of one batch from those of another."""
    leaves, treedef = jax.tree.flatten(args)
    return treedef, tuple(np.shape(leaf) for leaf in leaves)


def targets(options: argparse.Namespace) -> None:
    """Print all accelerators, or what is known of one."""
    print_text(str(all_targets() if options.name is None else target_named(options.name)))


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
