"""The API on one page: every public name with its arguments and the first line of its docstring."""

import inspect
from typing import Any

import jrc

# In the order in which a newcomer meets them; a public name that stands nowhere is an error.
ROOMS = {
    "Cut and re-run": (
        "mark", "recompute_segments", "find_segments", "recompute", "recompute_sequential",
        "recompute_scan", "recompute_module",
    ),
    "Say what stays": (
        "apply_rules", "Save", "SavePrimitives", "RecomputePrimitives", "Offload", "recompute_op",
        "keep_op",
    ),
    "See and plan": ("explain", "plan", "largest_batch"),
    "Compress": (
        "dgc_momentum", "scale_by_dgc", "l1_penalty", "l2_penalty", "dgc_stats", "dgc_specs",
        "reshard_dgc", "dgc_advice",
    ),
    "Train and save": ("init_state", "make_train_step", "save", "restore"),
    "What comes back": (
        "Report", "Plan", "BudgetError", "LargestBatch", "Segmentation", "Segment", "TrainState",
        "TrainStep", "StepInfo", "DGCState", "DGCStats", "DGCAdvice", "ExchangeCost",
    ),
}  # fmt: skip
MODULES = {
    "jrc.compat": "`append_backward`, `RecomputeOptimizer`, `DGCMomentumOptimizer`",
    "jrc.models": "`mlp`, `resnet`, `gpt`: each has `Config`, `init`, `apply`, `loss`",
    "jrc.dgc": "what options are made of: `Exact`, `TwoStage`, `Blocked`, `Global`, `Sampled`; "
    "`Float32`, `BFloat16`, `EightBits`",
}


def page() -> str:
    public = {name for name, x in vars(jrc).items() if name[0] != "_" and not inspect.ismodule(x)}
    listed = [name for names in ROOMS.values() for name in names]
    if wrong := public.symmetric_difference(listed):
        raise SystemExit(f"readme_api.py: put these into ROOMS, or out of it: {sorted(wrong)}")
    parts = []
    for room, names in ROOMS.items():
        rows = "".join(f"| `{call(name)}` | {first_line(name)} |\n" for name in names)
        parts.append(f"| {room} | |\n|---|---|\n{rows}")
    rows = "".join(f"| `{name}` | {what} |\n" for name, what in MODULES.items())
    parts.append(f"| Modules | |\n|---|---|\n{rows}")
    return "\n".join(parts)


def first_line(name: str) -> str:
    return (inspect.getdoc(getattr(jrc, name)) or "").splitlines()[0]


def call(name: str) -> str:
    """The name, and of what is called the arguments; those after `*` by name."""
    x: Any = getattr(jrc, name)
    if name in ROOMS["What comes back"]:
        return name
    said, named = [], False
    for argument in inspect.signature(x).parameters.values():
        if argument.kind is argument.VAR_POSITIONAL:
            said.append(f"*{argument.name}")
            named = True
            continue
        if argument.kind is argument.KEYWORD_ONLY and not named:
            said.append("*")
            named = True
        said.append(f"**{argument.name}" if argument.kind is argument.VAR_KEYWORD else
                    argument.name)  # fmt: skip
    return f"{name}({', '.join(said)})"
