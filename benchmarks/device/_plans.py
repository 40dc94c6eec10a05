"""Plans that are made before the accelerator is there, in files of a folder: one for each row."""

import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jrc
from benchmarks.device._rows import Settings

Plans = Mapping[str, jrc.Plan | jrc.BudgetError]
"""The plans of a row by name, and the errors of budgets that no plan fits."""


def path_of(folder: pathlib.Path, part: str, row: str, toy: bool) -> pathlib.Path:
    """Return the file of a row's plans."""
    name = "".join(c if c.isalnum() else "_" for c in row)
    return folder / f"{part}.{name}{'.toy' if toy else ''}.json"


def write_plans(path: pathlib.Path, found: Plans) -> None:
    """Write the plans of a row."""
    plans, failed = _parted(found)
    content = {"plans": {name: plan.to_json() for name, plan in plans.items()}, "failed": failed}
    path.write_text(f"{json.dumps(content, indent=1)}\n")


def plans_of(
    settings: Settings, part: str, row: str, make: Callable[[], Plans]
) -> tuple[dict[str, jrc.Plan], dict[str, str]]:
    """Return the plans of a row and what failed, both by name: from its file, or made now."""
    if settings.plans is None:
        return _parted(make())
    path = path_of(pathlib.Path(settings.plans), part, row, settings.toy)
    if not path.exists():
        return _parted(make())
    found: dict[str, Any] = json.loads(path.read_text())
    plans = {name: jrc.Plan.from_json(text) for name, text in found["plans"].items()}
    return plans, found["failed"]


def _parted(found: Plans) -> tuple[dict[str, jrc.Plan], dict[str, str]]:
    plans = {name: each for name, each in found.items() if isinstance(each, jrc.Plan)}
    return plans, {name: str(each) for name, each in found.items() if name not in plans}
