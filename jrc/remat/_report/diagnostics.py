"""The warnings of `jrc.explain`: recomputation without effect, each with the way out.

Three kinds are found: regions that free no memory, names and decisions of a policy that JAX does
not follow, and operator tags that nothing acts on.
"""

from collections.abc import Sequence
from typing import Any

from jrc._jaxpr import LiveEquation
from jrc.remat._report.policy_effects import ignored_decisions, unmatched_names
from jrc.remat._report.region_effects import needless_regions, useless_regions
from jrc.remat._report.rerun_regions import rerun_regions
from jrc.remat._report.tag_effects import tags_without_effect


def warnings_of(
    forward: Any, gradient: Any, program: Sequence[LiveEquation], name: str
) -> list[str]:
    """Return a warning for everything that has no effect.

    Args:
        forward: The function's program.
        gradient: The program of its value and gradient.
        program: The live equations of `gradient`.
        name: The function's name.
    """
    regions = rerun_regions(program, name)
    return [
        *needless_regions(forward, regions, name),
        *useless_regions(regions, gradient, program),
        *unmatched_names(forward, name),
        *ignored_decisions(regions),
        *tags_without_effect(program, name),
    ]
