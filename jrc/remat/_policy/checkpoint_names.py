"""The names under which `jax.checkpoint` saves values inside a recomputed region."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

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
    if not offloaded:
        return jax.checkpoint_policies.save_only_these_names(*saved)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=saved,
        names_which_can_be_offloaded=offloaded,
        offload_src="device",
        offload_dst=offloaded[0].partition(":")[2],
    )


def name_value(x, name: str):
    """Return the value under a name; a complex value is named in its two parts."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        # `jax.checkpoint` applies `reduce_precision` to what it saves, which takes no complex.
        return jax.lax.complex(checkpoint_name(x.real, name), checkpoint_name(x.imag, name))
    return checkpoint_name(x, name)


def is_own_name(name: str) -> bool:
    """Return whether this is a name of the three above, and no mark of a user."""
    return name in (SAVED, GROUP_SAVED) or name.startswith(OFFLOADED)
