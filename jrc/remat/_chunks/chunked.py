"""`jrc.chunked`: a function in chunks along independent axes."""

import dataclasses
from collections.abc import Callable, Container
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrc._errors import name_of, named_like, public
from jrc._jaxpr import (
    Dependent,
    Slices,
    Traced,
    equation_cost,
    facts_of,
    independent_axes,
    inlined_program,
    inner_programs,
    is_cast,
    is_variable,
    label,
    open_regions,
    own_flops,
    shape_of,
    sliced,
    trace,
)
from jrc._tree import is_traced, named_leaves
from jrc._validate import is_whole, whole_number
from jrc.remat._chunks.run_in_chunks import program_in_chunks
from jrc.remat._gradient.variable_changes import with_changes

Axes = Any

# What each chunk may compute again of a region, over the FLOPs of the region.
_SAME_IN_EACH_CHUNK = 0.02


@public("jrc.chunked")
def chunked(
    fn: Callable[..., Any], in_axes: Axes = 0, out_axes: Axes = 0, *, chunks: int
) -> Callable[..., Any]:
    """Return the function run in chunks along an axis whose slices it computes independently.

    The function is written for whole arrays, as it is: a mean stays a mean over everything. Its
    program is cut where it reads slices, into a loop over `chunks` slices: what the slices make is
    joined, what they add up to (a loss, the gradient of a weight) is summed, in
    float32 at least. What does not depend on the slices runs once, before the loop; what reads sums
    runs once, after it.

    Where all that comes out of the loop is scalars, such as a loss, each chunk computes its value
    and its gradient in one pass of the loop, so that nothing runs again and nothing of a chunk is
    saved. A `jax.checkpoint` inside is recomputed in that pass, where a slice of it can run by
    itself; else what it holds is written out. Elsewhere a chunk is recomputed in the backward pass.
    Forward mode, reverse mode and higher derivatives work, and so does `jax.vmap`.

    Random bits are those of the function itself: a chunk draws those at its positions, where JAX's
    default generator makes them, and other generators draw for the whole array, outside.

    Args:
        fn: A pure JAX-traceable function of pytrees. What it closes over is read whole.
        in_axes: The axis of each argument along which it is cut, as in `jax.vmap`: a whole number
            for all, `None` for an argument that every chunk reads whole, or a tuple, list or dict
            of these that begins the tree of arguments. Keyword arguments are read whole. Slices of
            several arguments belong together by their share: the first of 4 chunks reads the first
            quarter of each.
        out_axes: The axis of each result along which chunks are joined, as in `jax.vmap`; `None`
            for a sum. A scalar that is a sum may have any.
        chunks: How many chunks. They have equal size if that divides the axes that are cut; else
            each has as few entries as possible, and the last one what is left.

    Returns:
        A function of the same arguments with the same results.

    Raises:
        TypeError: If `fn` is not callable, an axis or `chunks` no whole number.
        ValueError: If the axis is not independent: the error names the equation that needs more
            than its slice, with its line. If there are fewer slices than `chunks`, or a result has
            the axis elsewhere than `out_axes` says.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def loss(w, tokens, labels):  # the logits of all tokens are never in memory
        ...     logits = jax.nn.log_softmax(tokens @ w)
        ...     return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], axis=1))
        >>> w, tokens, labels = jnp.ones((4, 50)), jnp.ones((32, 4)), jnp.zeros(32, int)
        >>> lean = jrc.chunked(loss, in_axes=(None, 0, 0), chunks=8)
        >>> bool(jnp.allclose(jax.grad(lean)(w, tokens, labels), jax.grad(loss)(w, tokens, labels)))
        True

    Source: independent axes are those of JAX's batching rules; the loss in one pass is that of
    Hsu et al., "Liger Kernel", arXiv 2410.10989 (its fused linear cross-entropy), here of any sum.
    """
    if not callable(fn):
        raise TypeError(f"fn must be callable, got {type(fn).__name__}. Pass the function itself.")
    remedy = "Write chunks=8: each chunk is an eighth of the axis then."
    count = whole_number(chunks, "chunks", least=1, remedy=remedy)
    _check_axes(in_axes, "in_axes")
    _check_axes(out_axes, "out_axes")

    @named_like(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        with public("jrc.chunked"):
            if count == 1:
                return fn(*args, **kwargs)
            args = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, args)
            written = _traced(fn, args, kwargs)
            traced = dataclasses.replace(written, program=inlined_program(written.program.jaxpr))
            slices = _with_regions(fn, traced, args, in_axes, count)
            if slices is None:
                opened = open_regions(traced.program.jaxpr).jaxpr
                traced = dataclasses.replace(written, program=inlined_program(opened))
                try:
                    slices = _slices(fn, traced, args, in_axes, count)
                except Dependent as error:
                    raise ValueError(_dependent(fn, error)) from None
            if slices.parts < count:
                raise ValueError(_wrong_count(slices.parts, count))
            _check_results(traced, slices, out_axes)
            return traced.run(program_in_chunks(slices, count))

    return run


def _traced(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """The program of a call.

    Raises:
        TypeError: If the function changes a flax module.
    """
    changed: list[int] = []
    changing = with_changes(fn, name_of(fn))

    def run(*args: Any, **kwargs: Any) -> Any:
        out, changes = changing(*args, **kwargs)
        changed[:] = changes
        return out

    traced = trace(run, args, kwargs)
    if changed:
        raise TypeError(
            f"fn must not change a flax module in place, got {name_of(fn)!r}, which does. Return "
            "what it changes, or chunk a function inside of it."
        )
    return traced


def _with_regions(
    fn: Callable[..., Any], traced: Traced, args: tuple[Any, ...], in_axes: Axes, count: int
) -> Slices | None:
    """The slices of a program whose `jax.checkpoint` regions stay, if all of them may.

    A slice of each must run by itself, and what does not depend on the slices must be little in it:
    it would run once a chunk.
    """
    try:
        slices = _slices(fn, traced, args, in_axes, count)
    except Dependent:
        return None
    eqns = [traced.program.eqns[step.position] for step in slices.steps]
    regions = [eqn for eqn in eqns if facts_of(eqn).is_region]
    read = {*slices.axes, *slices.sums}
    alone = all(_depends_on_slices(eqn, read, count) for eqn in regions)
    return slices if slices.parts >= count and alone else None


def _depends_on_slices(region: Any, cut: Container[Any], count: int) -> bool:
    """Whether little of a region does not depend on slices, and nothing of it is a cast.

    A cast of a weight inside of a `shard_map` sums its gradient over devices, in each chunk.
    """
    (inner,) = inner_programs(region)
    program = inlined_program(inner)
    depends = {
        v
        for v, x in zip(program.jaxpr.invars, region.invars, strict=True)
        if is_variable(x) and x in cut
    }
    same = total = 0
    for eqn in program.eqns:
        cost = equation_cost(eqn, own_flops)
        total += cost
        if depends.isdisjoint(filter(is_variable, eqn.invars)):
            if is_cast(eqn):
                return False
            same += cost
        else:
            depends.update(eqn.outvars)
    return same * count <= _SAME_IN_EACH_CHUNK * total


def _slices(
    fn: Callable[..., Any], traced: Traced, args: tuple[Any, ...], in_axes: Axes, count: int
) -> Slices:
    program = traced.program
    axes = _axes_of_arrays(args, tuple(in_axes) if isinstance(in_axes, list) else in_axes)
    inputs = program.jaxpr.invars[traced.closed :][: len(axes)]
    cut = {}
    for v, (name, axis) in zip(inputs, axes, strict=True):
        if axis is not None:
            cut[v] = at = _axis(axis, v, f"in_axes of {name}")
            if shape_of(v)[at] < min(count, 2):  # no rule has axes of one slice
                raise ValueError(_wrong_count(shape_of(v)[at], count))
            _check_whole_on_device(v, at, name)
    if not cut:
        raise ValueError(
            f"in_axes must name an axis of at least one array of `{name_of(fn)}`, got {in_axes!r}. "
            "Write the axis along which its results are independent, such as 0."
        )
    return sliced(program, cut, independent_axes)


def _axes_of_arrays(args: tuple[Any, ...], in_axes: Axes) -> list[tuple[str, Any]]:
    """The name and the axis of each array among the arguments."""
    leaves = named_leaves(args)
    axes = _broadcast(in_axes, args, "in_axes", "arguments")
    return [(name, axis) for (name, leaf), axis in zip(leaves, axes, strict=True)
            if is_traced(leaf)]  # fmt: skip


def _check_results(traced: Traced, slices: Slices, out_axes: Axes) -> None:
    """Raise unless each result that is joined has the axis where `out_axes` says."""
    tree = traced.result.fill(traced.program.jaxpr.outvars)
    axes = _broadcast(out_axes, tree, "out_axes", "results")
    for i, ((name, x), axis) in enumerate(zip(named_leaves(tree), axes, strict=True)):
        if not is_variable(x):
            continue
        found = slices.axes.get(x)
        wanted = None if axis is None or found is None else _axis(axis, x, "out_axes")
        is_summed = found is None and shape_of(x) and axis is not None and x in slices.late
        if found != wanted or is_summed:
            where = "is a sum over it" if found is None else f"has it at {found}"
            raise ValueError(
                f"out_axes must say where a result has the axis, got {axis} for result "
                f"{name or i}, which {where}. Write out_axes={found}."
            )


_WHOLE = object()


def _broadcast(axes: Axes, tree: Any, name: str, what: str) -> list[Any]:
    """One axis for each leaf of a tree, `None` among them."""
    known = jax.tree.map(lambda x: _WHOLE if x is None else x, axes, is_leaf=lambda x: x is None)
    try:
        full = jax.tree.broadcast(known, tree)
    except ValueError as error:
        where = str(error).partition("\n")[0]
        raise ValueError(
            f"{name} must begin the tree of the {what}, got {axes!r}. Write one axis for all of "
            f"them, or one for each, `None` for what has none ({where})."
        ) from None
    return [None if x is _WHOLE else x for x in jax.tree.leaves(full)]


def _axis(axis: int, v: Any, what: str) -> int:
    rank = v.aval.ndim
    if not rank:
        raise ValueError(f"{what} must be None for a number, got {axis}. Write None there.")
    if not -rank <= axis < rank:
        raise ValueError(
            f"{what} must be an axis of {v.aval.str_short()}, got {axis}. "
            f"Write a number from 0 to {rank - 1}, or None."
        )
    return axis % rank


def _check_axes(axes: Axes, name: str) -> None:
    for axis in jax.tree.leaves(axes):
        if not is_whole(axis):
            raise TypeError(
                f"{name} must hold whole numbers and None, got {axis!r}. Write {name}=0."
            )


def _check_whole_on_device(v: Any, axis: int, name: str) -> None:
    """Raise if an axis is split over devices in the type of a value, on an explicit mesh."""
    spec = getattr(getattr(v.aval, "sharding", None), "spec", ())
    if axis < len(spec) and spec[axis] is not None:
        raise ValueError(
            f"in_axes must name axes that are whole on each device, got axis {axis} of {name}, "
            f"which is split over {spec[axis]!r}. Call jrc.chunked inside of jax.shard_map."
        )


def _wrong_count(parts: int, chunks: int) -> str:
    return (
        f"chunks must be at most the slices of the axis, which has {parts}, got {chunks}. Write "
        f"chunks={max(parts, 1)}, or fewer."
    )


def _dependent(fn: Callable[..., Any], error: Dependent) -> str:
    what, _, place = label(error.eqn).partition("@")
    return (
        f"in_axes must name an axis along which `{name_of(fn)}` computes each slice by itself, got "
        f"one where {what} at {place} {error.reason}. Cut another axis, or "
        "take that operator out of the function."
    )
