"""The names under which `jax.checkpoint` saves values inside a recomputed region."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jrc._mesh_axes import is_on_automatic_axes

SAVED = "jrc.saved"
"""The name of values that are saved inside a recomputed region."""

GROUP_SAVED = "jrc.group"
"""The name of values that a group of recomputed operators saves (`_region/recompute_groups.py`)."""

OFFLOADED = "jrc.offloaded"
"""The name of values that are saved in another memory; the memory kind follows a colon."""

PINNED_HOST = f"{OFFLOADED}:pinned_host"
"""The name of values that a plan saves in the host's memory."""


def checkpoint_policy(names: Iterable[str]):
    """Return the policy of `jax.checkpoint` that saves the values with these names, no others."""
    saved = [name for name in names if not name.startswith(OFFLOADED)]
    offloaded = sorted(name for name in names if name.startswith(OFFLOADED))
    kind = offloaded[0].partition(":")[2] if offloaded else "pinned_host"
    return policy_of_names(saved, offloaded, kind)


def policy_of_names(saved: Sequence[str], offloaded: Sequence[str], kind: str) -> Callable:
    """Return JAX's policy that saves the values with some names, and moves those with others.

    JAX passes it the parameters of each equation by name, of which a primitive of a package may
    have one that is called as JAX's own argument: equinox has a `prim`.

    Args:
        saved: Names of values that are saved.
        offloaded: Names of those that are saved in another memory.
        kind: That memory.
    """
    policies = jax.checkpoint_policies
    if offloaded:
        by_name = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=saved,
            names_which_can_be_offloaded=offloaded,
            offload_src="device",
            offload_dst=kind,
        )
    else:
        by_name = policies.save_only_these_names(*saved)

    def policy(prim: Any, /, *avals: Any, **params: Any) -> Any:
        return by_name(prim, *avals, **{k: v for k, v in params.items() if k != "prim"})

    return policy


def name_value(x, name: str):
    """Return the value under a name; a complex value is named in its two parts.

    On automatic axes inside of explicit ones it stays as it is: JAX cannot save it there.
    """
    if is_on_automatic_axes(jax.typeof(x)):
        return x
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        # `jax.checkpoint` applies `reduce_precision` to what it saves, which takes no complex.
        return jax.lax.complex(checkpoint_name(x.real, name), checkpoint_name(x.imag, name))
    return checkpoint_name(x, name)


def is_own_name(name: str) -> bool:
    """Return whether this is a name of the three above, and no mark of a user."""
    return name in (SAVED, GROUP_SAVED) or name.startswith(OFFLOADED)
