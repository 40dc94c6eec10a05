"""MindSpore's switches: `Cell.recompute` and `Primitive.recompute`, as functions."""

from collections.abc import Callable
from typing import Any

from jrc._errors import public, speaking_as
from jrc._jaxpr import primitives_where
from jrc._validate import check_flag
from jrc.remat import SavePrimitives, keep_op, recompute_module, recompute_op

# MindSpore's optimizer sharding gathers the shards of a parameter where it is used.
_GATHERS = ("all_gather", "all_gather_invariant", "all_gather_reduced")
_OTHERS = tuple(sorted(primitives_where(lambda facts: facts.is_collective) - set(_GATHERS)))


@public("jrc.compat.recompute_cell")
def recompute_cell[M](
    cell: M,
    *,
    mp_comm_recompute: bool = True,
    parallel_optimizer_comm_recompute: bool | None = None,
) -> M:
    """Recompute a flax module in the backward pass: MindSpore's `cell.recompute(...)`.

    A thin form of `jrc.recompute_module`, in which the two arguments are
    `recompute_collectives=` and, where they differ, a rule:

    - True and False: `recompute_collectives=True, keep=jrc.SavePrimitives("all_gather")`
    - False and True: `recompute_collectives=True, keep=jrc.SavePrimitives("psum", ...)`

    Args:
        cell: A flax linen or nnx module, an instance or a class.
        mp_comm_recompute: Whether collectives of model parallelism (`psum`, `all_to_all`, …) run
            again in the backward pass.
        parallel_optimizer_comm_recompute: Whether `all_gather`, which re-assembles sharded
            parameters, runs again. `None` is the value of `mp_comm_recompute`. In MindSpore the
            default is False; to separate the two, the module needs a collective that is saved.

    Returns:
        The module in the form in which it was given; MindSpore changes the cell in place.

    Raises:
        TypeError: If `cell` is not a flax module, or a switch is not a bool.
        ValueError: When called, if the two switches differ and the module has no collective of the
            kind that is saved.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import linen as nn
        >>> dense = jrc.compat.recompute_cell(nn.Dense(2), mp_comm_recompute=False)
        >>> params = dense.init(jax.random.key(0), jnp.ones((1, 3)))
        >>> jax.grad(lambda params: dense.apply(params, jnp.ones((1, 3))).sum())(params).keys()
        dict_keys(['params'])

    Source: MindSpore `nn/cell.py`, `Cell.recompute`.
    """
    check_flag(mp_comm_recompute, "mp_comm_recompute")
    gathers = parallel_optimizer_comm_recompute
    if gathers is None:
        gathers = mp_comm_recompute
    check_flag(gathers, "parallel_optimizer_comm_recompute")
    options: dict[str, Any] = {"recompute_collectives": bool(mp_comm_recompute or gathers)}
    if bool(mp_comm_recompute) != bool(gathers):
        options["keep"] = SavePrimitives(*(_OTHERS if gathers else _GATHERS))
    with speaking_as("jrc.compat.recompute_cell", "jrc.recompute_module", module="cell"):
        return recompute_module(cell, **options)


@public("jrc.compat.recompute_primitive")
def recompute_primitive[F: Callable[..., Any]](primitive: F, mode: bool = True) -> F:
    """Recompute one operator, or keep its output: MindSpore's `primitive.recompute(mode)`.

    Args:
        primitive: Any JAX-traceable function of pytrees, such as `jax.nn.relu`.
        mode: Whether its output is recomputed in the backward pass (`jrc.recompute_op`) or kept
            although the region around it is recomputed (`jrc.keep_op`).

    Returns:
        The same function.

    Raises:
        TypeError: If `primitive` is not a function, or `mode` is not a bool.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> relu = jrc.compat.recompute_primitive(jax.nn.relu)
        >>> float(jax.grad(lambda x: relu(x).sum())(jnp.ones(3)).sum())
        3.0

    Source: MindSpore `ops/primitive.py`, `Primitive.recompute`.
    """
    check_flag(mode, "mode")
    tag = recompute_op if mode else keep_op
    with speaking_as("jrc.compat.recompute_primitive", f"jrc.{tag.__name__}", fn="primitive"):
        return tag(primitive)
