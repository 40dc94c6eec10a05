"""One plan for all processes of a run."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jrc._multihost import all_or_none
from jrc.remat._planner.plan.plan import Plan


def plan_of_process_0(find: Callable[[], Plan]) -> Plan:
    """Return the plan that process 0 finds, in all processes; where one fails, all fail."""
    # A process that raised would never come to the broadcast, where the others wait.
    found = all_or_none(find)
    if jax.process_count() == 1:
        return found
    from jax.experimental import multihost_utils

    text = found.to_json().encode()
    size = int(multihost_utils.broadcast_one_to_all(jnp.int32(len(text))))
    padded = jnp.frombuffer(text.ljust(size)[:size], dtype=jnp.uint8)
    return Plan.from_json(bytes(multihost_utils.broadcast_one_to_all(padded)).decode())
