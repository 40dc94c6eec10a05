"""The axes along which one equation computes each slice by itself, one rule a kind of primitive.

A rule names every such axis where operands and results have it. Slices are contiguous.
Sources: JAX's batching rules, and the factors of Shardy's sharding rules
(https://openxla.org/shardy).

>>> import jax, jax.numpy as jnp
>>> (eqn,) = jax.make_jaxpr(jax.lax.dot)(jnp.ones((2, 3)), jnp.ones((3, 4))).eqns
>>> for axis in dot_general(eqn):
...     print(axis)
IndependentAxis(operands=(0, None), results=(0,), parts=2, is_summed=False, counts=())
IndependentAxis(operands=(None, 1), results=(1,), parts=4, is_summed=False, counts=())
IndependentAxis(operands=(1, 0), results=(None,), parts=3, is_summed=True, counts=())
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from jrc._jaxpr.atoms import shape_of
from jrc._jaxpr.axes import dimension_numbers, operand_axes, reduced_axes, same_entries
from jrc._jaxpr.random_bits import are_drawn_by_position, is_threefry


@dataclasses.dataclass(frozen=True)
class IndependentAxis:
    """An axis along which an equation computes each slice by itself.

    Attributes:
        operands: Where each operand has the axis; `None` if every slice reads all of the operand.
        results: Where each result has it; all `None` where results are sums over it. `None` too
            for a result that nothing reads and that is the same in all slices.
        parts: Its length in the units that may be told apart: slices are some of them.
        is_summed: Whether results are sums of what the slices give.
        counts: Positions along the axis that a slice reads beside its operands: for each array of
            them how many the whole has, and their dtype.
    """

    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    parts: int
    is_summed: bool = False
    counts: tuple[tuple[int, str], ...] = ()


AxisRule = Callable[[JaxprEqn], Sequence[IndependentAxis]]


def none(_: JaxprEqn) -> list[IndependentAxis]:
    """Return no axis: nothing is known of the primitive."""
    return []


def elementwise(eqn: JaxprEqn, without: Collection[int] = ()) -> list[IndependentAxis]:
    """Return all axes but some; operands have them where their shape has them, numbers nowhere."""
    shape = shape_of(eqn.outvars[0])
    return [
        IndependentAxis(
            tuple(_same(shape_of(x), shape, axis) for x in eqn.invars),
            tuple(axis for _ in eqn.outvars),
            length,
        )
        for axis, length in enumerate(shape)
        if length > 1 and axis not in without
    ]


def along_axis(eqn: JaxprEqn) -> list[IndependentAxis]:
    """Return all axes but the one that the equation works along: a cumulative sum, a sort."""
    params, rank = eqn.params, len(shape_of(eqn.invars[0]))
    (axis,) = [int(params[key]) for key in ("axis", "dimension") if key in params]
    return _kept(eqn, {axis % rank})


def reverse(eqn: JaxprEqn) -> list[IndependentAxis]:
    """Return the axes that are not reversed."""
    return elementwise(eqn, eqn.params["dimensions"])


def reduction(eqn: JaxprEqn) -> list[IndependentAxis]:
    """Return the axes that are not reduced."""
    reduced = set(reduced_axes(eqn))
    kept = [axis for axis in range(len(shape_of(eqn.invars[0]))) if axis not in reduced]
    return [
        IndependentAxis(
            tuple(axis if shape_of(x) else None for x in eqn.invars),
            tuple(place for _ in eqn.outvars),
            length,
        )
        for place, axis in enumerate(kept)
        if (length := shape_of(eqn.invars[0])[axis]) > 1
    ]


def sum_of_axes(eqn: JaxprEqn) -> list[IndependentAxis]:
    """Return the axes of a sum: those that are kept, and those that are summed."""
    summed = [
        IndependentAxis((axis,), (None,), length, is_summed=True)
        for axis, length in enumerate(shape_of(eqn.invars[0]))
        if axis in reduced_axes(eqn) and length > 1
    ]
    return [*reduction(eqn), *summed]


def broadcast(eqn: JaxprEqn) -> list[IndependentAxis]:
    """Return all axes of the result; the operand has those that are not repeated."""
    places = {to: axis for axis, to in enumerate(eqn.params["broadcast_dimensions"])}
    given, shape = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    found = []
    for axis, length in enumerate(shape):
        place = places.get(axis)
        if place is not None and given[place] != length:
            place = None
        if length > 1:
            found.append(IndependentAxis((place, *_nothing(eqn.invars[1:])), (axis,), length))
    return found


def reshape(eqn: JaxprEqn) -> list[IndependentAxis]:
    """Return the axes that stay contiguous: of axes that are merged or split, the first one."""
    shape = shape_of(eqn.invars[0])
    order = eqn.params.get("dimensions") or range(len(shape))  # in which they are merged
    found = []
    for before, after in same_entries([shape[axis] for axis in order], shape_of(eqn.outvars[0])):
        if before and after:
            (place, length), (to, other) = before[0], after[0]
            parts = math.gcd(length, other)
            if parts > 1:
                found.append(IndependentAxis((order[place],), (to,), parts))
    return found


def squeeze(eqn: JaxprEqn) -> list[IndependentAxis]:
    """Return the axes that stay."""
    gone = set(eqn.params["dimensions"])
    shape = shape_of(eqn.invars[0])
    kept = [axis for axis in range(len(shape)) if axis not in gone]
    return [
        IndependentAxis((axis,), (to,), shape[axis])
        for to, axis in enumerate(kept)
        if shape[axis] > 1
    ]


def transpose(eqn: JaxprEqn) -> list[IndependentAxis]:
    """Return all axes, permuted."""
    return [
        IndependentAxis((axis,), (to,), length)
        for to, axis in enumerate(eqn.params["permutation"])
        if (length := shape_of(eqn.outvars[0])[to]) > 1
    ]


def padding(eqn: JaxprEqn) -> list[IndependentAxis]:
    """Return the axes that are not padded."""
    padded = [axis for axis, each in enumerate(eqn.params["padding_config"]) if any(each)]
    return elementwise(eqn, padded)


def part(eqn: JaxprEqn) -> list[IndependentAxis]:
    """Return the axes of which a slice at fixed or computed places takes all."""
    given, shape = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    strides = eqn.params.get("strides") or (1,) * len(shape)
    return [
        IndependentAxis((axis, *_nothing(eqn.invars[1:])), (axis,), length)
        for axis, length in enumerate(shape)
        if length > 1 and length == given[axis] and strides[axis] == 1
    ]


def update(eqn: JaxprEqn) -> list[IndependentAxis]:
    """Return the axes of which a written part is as long as what it is written into."""
    whole, written = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    return [
        IndependentAxis((axis, axis, *_nothing(eqn.invars[2:])), (axis,), length)
        for axis, length in enumerate(whole)
        if length > 1 and length == written[axis]
    ]


def iota(eqn: JaxprEqn) -> list[IndependentAxis]:
    """Return all axes; along its own a slice reads its numbers."""
    counted, dtype = eqn.params["dimension"], str(eqn.params["dtype"])
    return [
        IndependentAxis((), (axis,), length, counts=((length, dtype),) * (axis == counted))
        for axis, length in enumerate(shape_of(eqn.outvars[0]))
        if length > 1
    ]


def random_bits(eqn: JaxprEqn) -> list[IndependentAxis]:
    """Return the axes of the keys, and those of one key's bits that are drawn by their position.

    Of several keys other generators than Threefry draw bits that depend on how many they are.
    """
    shape, keys = shape_of(eqn.outvars[0]), len(shape_of(eqn.invars[0]))
    along = len(shape) if are_drawn_by_position(eqn) else keys if is_threefry(eqn) else 0
    return [
        IndependentAxis(
            (axis if axis < keys else None,),
            (axis,),
            shape[axis],
            counts=((shape[axis], "uint32"),) * (axis >= keys),
        )
        for axis in range(along)
        if shape[axis] > 1
    ]


def bitcast(eqn: JaxprEqn) -> list[IndependentAxis]:
    """Return all axes, where numbers have as many bits as before."""
    return elementwise(eqn) if shape_of(eqn.invars[0]) == shape_of(eqn.outvars[0]) else []


def stack(eqn: JaxprEqn) -> list[IndependentAxis]:
    """Return the axes of the operands; the result has one more."""
    new = eqn.params["axis"] % len(shape_of(eqn.outvars[0]))
    return [
        IndependentAxis(tuple(axis for _ in eqn.invars), (axis + (axis >= new),), length)
        for axis, length in enumerate(shape_of(eqn.invars[0]))
        if length > 1
    ]


def unstack(eqn: JaxprEqn) -> list[IndependentAxis]:
    """Return the axes of the results; the operand has one more."""
    old = eqn.params["axis"] % len(shape_of(eqn.invars[0]))
    return [
        IndependentAxis((axis + (axis >= old),), tuple(axis for _ in eqn.outvars), length)
        for axis, length in enumerate(shape_of(eqn.outvars[0]))
        if length > 1
    ]


def tile(eqn: JaxprEqn) -> list[IndependentAxis]:
    """Return the axes that are not repeated."""
    return elementwise(eqn, [axis for axis, n in enumerate(eqn.params["reps"]) if n != 1])


def window(eqn: JaxprEqn) -> list[IndependentAxis]:
    """Return the axes along which the window is one entry wide."""
    params = eqn.params
    keys = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    wide = [
        axis
        for axis, edges in enumerate(params["padding"])
        if any(edges) or any(params[key][axis] != 1 for key in keys)
    ]
    return elementwise(eqn, wide)


def dot_general(eqn: JaxprEqn) -> list[IndependentAxis]:
    """Return the batch axes, the free axes of both operands, and the contracted ones as sums."""
    left, right = operand_axes(eqn, 0), operand_axes(eqn, 1)
    sizes = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    batch = len(left.batch)
    found = [
        IndependentAxis((a, b), (to,), sizes[0][a])
        for to, (a, b) in enumerate(zip(left.batch, right.batch, strict=True))
    ]
    found += [
        IndependentAxis((a, None), (batch + to,), sizes[0][a]) for to, a in enumerate(left.free)
    ]
    first = batch + len(left.free)
    found += [
        IndependentAxis((None, b), (first + to,), sizes[1][b]) for to, b in enumerate(right.free)
    ]
    found += [
        IndependentAxis((a, b), (None,), sizes[0][a], is_summed=True)
        for a, b in zip(left.contracted, right.contracted, strict=True)
    ]
    return [axis for axis in found if axis.parts > 1]


def convolution(eqn: JaxprEqn) -> list[IndependentAxis]:
    """Return the batch, groups, or output features, and input features as a sum."""
    numbers, params = dimension_numbers(eqn), eqn.params
    given, kernel, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    sizes = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    found = []
    if params["batch_group_count"] == 1:
        found.append(IndependentAxis((given[0], None), (out[0],), sizes[0][given[0]]))
    # Groups are of axes of the images, batch or features, and of the features of the result.
    for axis, key in zip(given, ("batch_group_count", "feature_group_count"), strict=False):
        found.append(IndependentAxis((axis, kernel[0]), (out[1],), params[key]))
    if params["batch_group_count"] == params["feature_group_count"] == 1:
        found.append(IndependentAxis((None, kernel[0]), (out[1],), sizes[1][kernel[0]]))
        found.append(
            IndependentAxis((given[1], kernel[1]), (None,), sizes[0][given[1]], is_summed=True)
        )
    return [axis for axis in found if axis.parts > 1]


def gather(eqn: JaxprEqn) -> list[IndependentAxis]:
    """Return the axes of the indices, batch axes, and those of the operand that are taken whole."""
    numbers = eqn.params["dimension_numbers"]
    given, indices, out = map(shape_of, (eqn.invars[0], eqn.invars[1], eqn.outvars[0]))
    batch = [axis for axis in range(len(out)) if axis not in numbers.offset_dims]
    shared = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims,
                      strict=True))  # fmt: skip
    found = [
        IndependentAxis((shared.get(axis), axis), (to,), indices[axis])
        for axis, to in enumerate(batch)
    ]
    taken = _window_axes(len(given), numbers.collapsed_slice_dims, numbers.operand_batching_dims)
    for axis, to in zip(taken, numbers.offset_dims, strict=True):
        is_whole = eqn.params["slice_sizes"][axis] == given[axis]
        if is_whole and axis not in numbers.start_index_map:
            found.append(IndependentAxis((axis, None), (to,), given[axis]))
    return [axis for axis in found if axis.parts > 1]


def scatter(eqn: JaxprEqn) -> list[IndependentAxis]:
    """Return batch axes, and those of the operand that are written whole."""
    numbers = eqn.params["dimension_numbers"]
    given, updates = shape_of(eqn.invars[0]), shape_of(eqn.invars[2])
    scattered = [axis for axis in range(len(updates)) if axis not in numbers.update_window_dims]
    found = [
        IndependentAxis((axis, place, scattered[place]), (axis,), given[axis])
        for axis, place in zip(
            numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True
        )
    ]
    written = _window_axes(len(given), numbers.inserted_window_dims, numbers.operand_batching_dims)
    for axis, place in zip(written, numbers.update_window_dims, strict=True):
        is_whole = updates[place] == given[axis]
        if is_whole and axis not in numbers.scatter_dims_to_operand_dims:
            found.append(IndependentAxis((axis, None, place), (axis,), given[axis]))
    return [axis for axis in found if axis.parts > 1]


def matrices(eqn: JaxprEqn) -> list[IndependentAxis]:
    """Return the axes in front of the last two: a factorisation of a stack of matrices."""
    count = len(shape_of(eqn.invars[0])) - 2
    if any(len(shape_of(x)) < count for x in (*eqn.invars, *eqn.outvars)):
        return []
    return [
        IndependentAxis(
            tuple(axis for _ in eqn.invars),
            tuple(axis for _ in eqn.outvars),
            shape_of(eqn.invars[0])[axis],
        )
        for axis in range(count)
        if shape_of(eqn.invars[0])[axis] > 1
    ]


def fourier(eqn: JaxprEqn) -> list[IndependentAxis]:
    """Return the axes in front of those that are transformed, the last ones."""
    rank = len(shape_of(eqn.invars[0]))
    return _kept(eqn, range(rank - len(eqn.params["fft_lengths"]), rank))


def barrier(eqn: JaxprEqn) -> list[IndependentAxis]:
    """Return the axes of what passes a barrier together, if all of it has one shape."""
    return elementwise(eqn) if len({shape_of(x) for x in eqn.invars}) == 1 else []


def _kept(eqn: JaxprEqn, used: Collection[int]) -> list[IndependentAxis]:
    """All axes but some, of operands and results of one rank but perhaps another length there."""
    shape = shape_of(eqn.invars[0])
    return [
        IndependentAxis(
            tuple(axis if len(shape_of(x)) == len(shape) else None for x in eqn.invars),
            tuple(axis for _ in eqn.outvars),
            length,
        )
        for axis, length in enumerate(shape)
        if length > 1 and axis not in used
    ]


def _window_axes(rank: int, *without: Sequence[Any]) -> list[int]:
    gone = {axis for axes in without for axis in axes}
    return [axis for axis in range(rank) if axis not in gone]


def _same(shape: Sequence[int], whole: Sequence[int], axis: int) -> int | None:
    return axis if len(shape) == len(whole) and shape[axis] == whole[axis] else None


def _nothing(atoms: Sequence[Any]) -> Iterator[None]:
    return (None for _ in atoms)
