"""The API on one page: every public name, its arguments and the first line of its docstring."""

import importlib
import inspect
from collections.abc import Iterable
from typing import Any

import jrc

# In the order in which a newcomer needs them; a public name without a group is an error.
GROUPS = {
    "Cut and recompute": (
        "mark", "recompute_segments", "find_segments", "recompute", "recompute_sequential",
        "recompute_scan", "recompute_module",
    ),
    "Choose what is saved": (
        "apply_rules", "Save", "SavePrimitives", "RecomputePrimitives", "Offload", "recompute_op",
        "keep_op",
    ),
    "Explain and plan": (
        "explain", "plan", "largest_batch", "chunked", "target", "targets",
    ),
    "Compress": (
        "dgc_momentum", "scale_by_dgc", "scale_by_ef21", "l1_penalty", "l2_penalty", "dgc_stats",
        "dgc_specs", "reshard_dgc", "flush", "dgc_advice",
    ),
    "Synchronise seldom": ("SparseLoCo", "DiLoCo", "communication_advice", "reshard"),
    "Train and save": ("init_state", "make_train_step", "save", "restore"),
    "Results": (
        "Report", "Plan", "BudgetError", "LargestBatch", "Segmentation", "Segment", "TrainState",
        "TrainStep", "StepInfo", "DGCState", "EF21State", "DGCStats", "DGCAdvice", "ExchangeCost",
        "Target", "OuterState", "CommunicationAdvice", "WayCost",
    ),
}  # fmt: skip
WITH_MEMBERS = ("Plan", "Report", "BudgetError", "LargestBatch", "TrainStep", "Target")
MODULES = {
    "jrc.compat": "Paddle's and MindSpore's names",
    "jrc.models": "models of pure functions, each with `Config`, `init`, `apply`, `loss`",
    "jrc.dgc": "values of options, and what an object of your own has to have",
    "jrc.outer_optimizers": "what an outer optimizer of your own has to have",
}


def page() -> str:
    """Return the tables of all groups.

    Raises:
        SystemExit: If the groups do not have exactly the public names.
    """
    public = {name for name, x in vars(jrc).items() if name[0] != "_" and not inspect.ismodule(x)}
    listed = [name for names in GROUPS.values() for name in names]
    if wrong := public.symmetric_difference(listed):
        raise SystemExit(
            f"benchmarks/readme/_api.py: GROUPS must have every public name of jrc and no other, "
            f"got a difference in {', '.join(sorted(wrong))}. Add or remove these."
        )
    parts = []
    for group, names in GROUPS.items():
        rows = "".join(f"| `{call(name)}` | {first_line(name)} |\n" for name in names)
        parts.append(f"| {group} | |\n|---|---|\n{rows}")
    rows = "".join(f"| `{name}` | {_quoted(members(name))} |\n" for name in WITH_MEMBERS)
    parts.append(f"| What results have | |\n|---|---|\n{rows}")
    rows = "".join(
        f"| `{name}` | {what}: {_quoted(names_in(name))} |\n" for name, what in MODULES.items()
    )
    parts.append(f"| Modules | |\n|---|---|\n{rows}")
    return "\n".join(parts)


def members(name: str) -> list[str]:
    """Return the attributes and methods of a class, without those of Python's own classes."""
    cls = getattr(jrc, name)
    own = [each for each in cls.__mro__ if each.__module__.startswith("jrc.")]
    names = {key: None for each in own for key in (*inspect.get_annotations(each), *vars(each))}
    return [
        f"{key}()" if inspect.isroutine(getattr(cls, key, None)) else key
        for key in names
        if key[0] != "_"
    ]


def names_in(module: str) -> list[str]:
    """Return the names of a module, without those of what `jrc` itself has by the same name."""
    inside = {k: x for k, x in vars(importlib.import_module(module)).items() if k[0] != "_"}
    modules = [key for key, x in inside.items() if inspect.ismodule(x)]
    others = [key for key in inside if key not in modules]
    return sorted(key for key in others or modules if getattr(jrc, key, None) is not inside[key])


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def first_line(name: str) -> str:
    """Return the first line of a public name's docstring."""
    return (inspect.getdoc(getattr(jrc, name)) or "").splitlines()[0]


def call(name: str) -> str:
    """Return a public name, for functions with its arguments; those after `*` by name."""
    x: Any = getattr(jrc, name)
    if name in GROUPS["Results"]:
        return name
    words, star = [], False
    for argument in inspect.signature(x).parameters.values():
        if argument.kind is argument.VAR_POSITIONAL:
            words.append(f"*{argument.name}")
            star = True
            continue
        if argument.kind is argument.KEYWORD_ONLY and not star:
            words.append("*")
            star = True
        prefix = "**" if argument.kind is argument.VAR_KEYWORD else ""
        words.append(prefix + argument.name)
    return f"{name}({', '.join(words)})"
