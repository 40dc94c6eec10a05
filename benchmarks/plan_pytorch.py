"""PyTorch's activation memory budget beside plans, on the same unrolled GPT.

The figures were measured with PyTorch 2.13 on CPU: `torch._functorch.config.
activation_memory_budget` of a compiled model (last column: `torch.utils.checkpoint` of every
block), with the shapes of `gpt` in `plan_models.py`, float32. Saved bytes and peak are in MB (10⁶);
the peak is the heap above the parameters during one forward and backward pass, gradients (39 MB)
included. The ratio is matrix-product FLOPs over those with nothing re-run. What stands beside
their peak is XLA's temporaries and outputs, which are the gradients.
Their bytes are rounded to 1 MB, their ratios to 0.001; so is what is compared with them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from plan_measure import PRODUCTS

from jrc._jaxpr import primitive_name
from jrc._tree import is_floating
from jrc.remat._planning.cuts import choice_of
from jrc.remat._planning.flow import moved
from jrc.remat._planning.solve import solve
from jrc.remat._planning.weigh import graph_of

MB = 10**6
# Compilations of a search, so that the steps between two plans do not hide what is compared.
FINER = 7
COLUMNS = ("0.9", "0.8", "0.7", "0.6", "0.5", "0.4", "0.3", "0.2", "0.1", "0.0", "per block")
SAVED = (709, 623, 556, 484, 388, 321, 241, 161, 80, 0, 31)
PEAK = (761, 712, 645, 578, 477, 410, 334, 271, 190, 855, 151)
RATIO = (1.000, 1.004, 1.010, 1.021, 1.028, 1.035, 1.052, 1.117, 1.185, 1.333, 1.249)


def compare(planner: Any, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For every column: theirs, jrc's cheapest choice that saves no more, jrc's within the peak.

    A plan is asked for by its peak. What is compared at equal saved bytes is the same solver on
    the same program, with saved bytes alone to weigh, as theirs does.
    """
    base, planner = found["baseline"], planner.finer(FINER)
    graph, points = _by_saved_bytes(planner.candidates.program)
    rows = []
    for column, saved, peak, ratio in zip(COLUMNS, SAVED, PEAK, RATIO, strict=True):
        fitting = [point for point in points if point.saved <= (saved + 0.5) * MB]
        within = planner.within(int((peak + 0.5) * MB) + base["arguments"])
        row = {"column": column, "saved": saved * MB, "peak": peak * MB, "ratio": ratio}
        if fitting:
            point = min(fitting, key=lambda point: point.flops)
            best = planner.counts(planner.as_chosen(choice_of(graph, point)))
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


def _by_saved_bytes(program: Any) -> Any:
    """The graph of the program, and its front of choices by saved bytes and product FLOPs alone."""
    moving = [v for v in program.jaxpr.invars if is_floating(v.aval)]
    graph = graph_of(program, moved(program, moving, program.jaxpr.outvars[:1]))
    nothing = (0,) * len(graph.sizes)
    nodes = tuple(
        dataclasses.replace(
            node, back=0, operands=(), flops=node.flops * _is_product(program, node)
        )
        for node in graph.nodes
    )
    weighed = dataclasses.replace(graph, nodes=nodes, remade=nothing, passing=nothing)
    return graph, solve(weighed, limit=2000, tiny=0.0)


def _is_product(program: Any, node: Any) -> bool:
    return primitive_name(program.eqns[node.position]) in PRODUCTS
