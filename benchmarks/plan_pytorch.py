"""PyTorch's activation memory budget beside plans, on the same unrolled GPT.

The figures were measured with PyTorch 2.13 on CPU: `torch._functorch.config.
activation_memory_budget` of a compiled model (last column: `torch.utils.checkpoint` of every
block), with the shapes of `gpt` in `plan_models.py`, float32. Saved bytes and peak are in MB (10⁶);
the peak is the heap above the parameters during one forward and backward pass, gradients (39 MB)
included. The ratio is matrix-product FLOPs over those with nothing re-run. What stands beside
their peak is XLA's temporaries and outputs, which are the gradients.
"""

from collections.abc import Mapping
from typing import Any

MB = 10**6
COLUMNS = ("0.9", "0.8", "0.7", "0.6", "0.5", "0.4", "0.3", "0.2", "0.1", "0.0", "per block")
SAVED = (709, 623, 556, 484, 388, 321, 241, 161, 80, 0, 31)
PEAK = (761, 712, 645, 578, 477, 410, 334, 271, 190, 855, 151)
RATIO = (1.000, 1.004, 1.010, 1.021, 1.028, 1.035, 1.052, 1.117, 1.185, 1.333, 1.249)


def compare(planner: Any, found: Mapping[str, Any], rungs: int) -> list[dict[str, Any]]:
    """For every column: theirs, jrc's cheapest plan that saves no more, jrc's within the peak.

    A plan is asked for by its peak. So the one with as few saved bytes is looked for among
    uncompiled plans for `rungs` budgets between the least peak and that of nothing re-run.
    """
    base, least = found["baseline"], found["least"]
    span = base["peak"] - least
    ladder = [planner.uncompiled(least + span * i // rungs) for i in range(rungs + 1)]
    rows = []
    for column, saved, peak, ratio in zip(COLUMNS, SAVED, PEAK, RATIO, strict=True):
        fitting = [rung for rung in ladder if rung["saved"] <= saved * MB]
        within = planner.within(peak * MB + base["arguments"])
        row = {"column": column, "saved": saved * MB, "peak": peak * MB, "ratio": ratio}
        if fitting:
            best = min(fitting, key=lambda rung: (rung["product_flops"], rung["saved"]))
            row["at_saved"] = {
                "saved": best["saved"],
                "ratio": best["product_flops"] / base["product_flops"],
            }
        if "peak" in within:
            row["at_peak"] = {
                "peak": within["temporaries"] + within["outputs"],
                "saved": within["saved"],
                "ratio": within["product_flops"] / base["product_flops"],
            }
        else:
            row["least"] = within["least"] - base["arguments"]
        rows.append(row)
    return rows
