"""A region in chunks where devices split its arrays: each computes chunks of its own part.

A chunk cut across devices would be gathered on all of them. So the region runs under `jax.vmap`
over the parts first, of which XLA gives each device its own, and in chunks inside. A weight is
read by all parts: its gradient is summed over the chunks of a part in the loop, and over parts
once, after the loop. In the same way it is gathered once, before the loop.

>>> import jax, jax.numpy as jnp
>>> from jrc.remat._chunks.run_in_chunks import run_in_chunks
>>> loss = lambda x, w: jnp.mean(jnp.tanh(x @ w))
>>> x, w = jnp.ones((8, 3)), jnp.ones((3, 4))
>>> program = Program(jax.make_jaxpr(loss)(x, w))
>>> parts = ShardedRegion(program, {0: 0}, [PartsOf({0: 0}, 2, ("data",))])
>>> in_chunks = lambda slices, values, results, _: run_in_chunks(slices, 4, values, results)
>>> (mean,) = parts.run([x, w], in_chunks)
>>> bool(jnp.allclose(mean, loss(x, w))), parts.slices.parts
(True, 4)
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence, Set
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jrc._jaxpr import (
    Dependent,
    Program,
    Slices,
    Split,
    SplitValues,
    counted,
    evaluate,
    independent_axes,
    is_convolution,
    slice_program,
    sliced,
    walk,
    zeros_below,
)
from jrc._specs import names_of, without_axes
from jrc._tree import is_floating
from jrc.remat._chunks.run_in_chunks import cut, join
from jrc.remat._chunks.sum_and_gradient import filled, raised
from jrc.remat._gradient.activity import active_variables

RunChunks = Callable[[Slices, Mapping[Any, Any], Sequence[Any], Sequence[int]], list[Any]]
"""From what runs on slices, the values that it reads, and results that are wanted, to these.

Last come the positions that these results have among those of the whole region."""


class PartsOf(NamedTuple):
    """The parts of a region along one axis.

    Attributes:
        axes: The axis of each input that has it, by the input's position.
        parts: How many parts.
        names: The mesh axes that they lie along.
        split: How inputs that are no data are split over other mesh axes, by their position.
    """

    axes: Mapping[int, int]
    parts: int
    names: tuple[str, ...]
    split: Mapping[int, Split] = {}


class ShardedRegion:
    """A program of which each part along some axes runs by itself, and in slices there.

    Args:
        program: The program. Its results are different values.
        axes: The axis of the slices in each input that has it, by the input's position.
        parts: How it is split into parts, the outermost first; none for slices alone.

    Attributes:
        parts: As given.
        slices: What runs on slices, in the innermost part.

    Raises:
        Dependent: If an axis is not independent.
        ValueError: If a result is made of sums over an axis, there are no such equal parts, or the
            program convolves and has parts.
    """

    parts: tuple[PartsOf, ...]
    slices: Slices

    def __init__(
        self, program: Program, axes: Mapping[int, int], parts: Sequence[PartsOf] = ()
    ) -> None:
        if parts and any(is_convolution(eqn) for eqn, _ in walk(program.jaxpr)):
            raise ValueError("XLA computes wrong gradients of kernels in parts over devices")
        self._program, self.parts = program, tuple(parts)
        self._inner: ShardedRegion | None = None
        first, rest = (parts[0], parts[1:]) if parts else (None, ())
        along = axes if first is None else first.axes
        inputs, results = program.jaxpr.invars, program.jaxpr.outvars
        cut_inputs = {inputs[i]: at for i, at in along.items()}
        self._slices = sliced(program, cut_inputs, independent_axes, range(len(program.eqns)))
        if any(v in self._slices.late and v not in self._slices.sums for v in results):
            raise ValueError("a result is made of sums")
        self._sums = [v for v in results if v in self._slices.sums]
        self._joined = [v for v in results if v in self._slices.axes]
        early = [v for v in results if v not in self._slices.made]
        made_here = {v for eqn in program.eqns for v in eqn.outvars}
        wanted = [v for v in (*self._slices.read, *early) if v in made_here]
        live = program.live(wanted)
        before = [p for p, is_live in enumerate(live) if is_live and p not in self._slices.run]
        self._before = program.cut(before, list(dict.fromkeys(wanted)))
        self._made = [*self._sums, *self._joined]
        if first is None:
            self.slices = self._slices
            return
        if not self._slices.parts or self._slices.parts % first.parts:
            raise ValueError(f"{self._slices.parts} slices are no {first.parts} equal parts")
        given = {inputs[i]: split for i, split in first.split.items()}
        split = SplitValues(program, given, (), {})
        self._splits = [split.of(v) for v in self._slices.whole]
        inside = {i: split.of(v) for i, v in enumerate(self._slices.read) if any(split.of(v))}
        part = slice_program(self._slices, Fraction(1, first.parts), self._made)
        self._inner = ShardedRegion(
            Program(part),
            self._of_part(axes),
            [each._replace(axes=self._of_part(each.axes), split=inside) for each in rest],
        )
        self.slices = self._inner.slices

    @property
    def made_before_parts(self) -> set[Any]:
        """What is computed whole, in front of parts: values of the program, and of a part of it."""
        if self._inner is None:
            return set()
        here = {v for eqn in self._before.eqns for v in eqn.outvars}
        return here | self._inner.made_before_parts

    def _of_part(self, axes: Mapping[int, int]) -> dict[int, int]:
        """Axes of inputs, for the inputs of the program of one part."""
        inputs = self._program.jaxpr.invars
        known = {inputs[i]: at for i, at in axes.items()}
        return {i: known[v] for i, v in enumerate(self._slices.read) if v in known}

    def innermost(
        self, active: Set[Any], which: Sequence[int] | None = None
    ) -> tuple[list[Any], list[int], set[Any]]:
        """Return the results of `slices`, their positions among all, and what of it is active.

        Args:
            active: The inputs that the program is differentiated by.
            which: As for `run`.
        """
        program = self._program
        which = range(len(program.jaxpr.outvars)) if which is None else which
        position = dict(zip(program.jaxpr.outvars, which, strict=True))
        made = [position[v] for v in self._made]
        found = active_variables(program, active, program.jaxpr.outvars)
        if self._inner is None:
            return self._made, made, found
        inputs = self._inner._program.jaxpr.invars
        inside = {inputs[i] for i, v in enumerate(self._slices.read) if v in found}
        return self._inner.innermost(inside, made)

    def run(
        self, args: Sequence[Any], run_chunks: RunChunks, which: Sequence[int] | None = None
    ) -> list[Any]:
        """Run the program, and return its results.

        Args:
            args: Its inputs.
            run_chunks: Runs what is computed slice by slice.
            which: The positions of the results among those of the region that this is a part of.
        """
        results = self._program.jaxpr.outvars
        which = range(len(results)) if which is None else which
        values: dict[Any, Any] = dict(zip(self._program.jaxpr.invars, args, strict=True))
        early = evaluate(self._before)(*(values[v] for v in self._before.invars))
        values |= dict(zip(self._before.outvars, early, strict=True))
        position = dict(zip(results, which, strict=True))
        made = [position[v] for v in self._made]
        if self._inner is None:
            found = run_chunks(self._slices, values, self._made, made)
        else:
            found = self._run_parts(values, self._inner, run_chunks, made)
        values |= dict(zip(self._made, found, strict=True))
        return [values[v] for v in results]

    def _run_parts(
        self,
        values: Mapping[Any, Any],
        inner: "ShardedRegion",
        run_chunks: RunChunks,
        which: Sequence[int],
    ) -> list[Any]:
        slices, count = self._slices, self.parts[0].parts
        # Read by all parts a weight would have its gradient summed over devices in each chunk.
        whole = [values[v] for v in slices.whole]
        is_copied = [is_floating(x) for x in whole]
        operands = [
            *(_for_parts(x, self.parts[0], split)
              for x, copied, split in zip(whole, is_copied, self._splits, strict=True) if copied),
            *(_where_parts_are(cut(values[v], axis, count), self.parts[0])
              for v, axis in slices.given),
            *(jnp.arange(*x.shape, dtype=x.dtype).reshape(count, -1) for x in counted(slices)),
        ]  # fmt: skip
        copies = sum(is_copied)

        def part(*operands: Any) -> list[Any]:
            read = filled(whole, is_copied, operands[:copies])
            return inner.run([*read, *operands[copies:]], run_chunks, which)

        made = jax.vmap(part)(*_on_explicit_axes(operands, self.parts[0].names))
        sums = [_sum_of_parts(x) for x in made[: len(self._sums)]]
        joined = made[len(self._sums) :]
        return [*sums, *(join(x, slices.axes[v])
                         for v, x in zip(self._joined, joined, strict=True))]  # fmt: skip


def _for_parts(x: Any, parts: PartsOf, split: Split) -> Any:
    """Copies of a value, one for each part, where that part is; each is split as the value is."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    shape = (parts.parts, *x.shape)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return jnp.broadcast_to(x, shape)
    if not all(name in sharding.mesh.explicit_axes for name in parts.names):
        return _where_parts_are(jnp.broadcast_to(x, shape), parts, split)
    spec = without_axes(sharding.spec, parts.names)
    if spec != sharding.spec:  # gathered once for all chunks
        x = jax.sharding.reshard(x, NamedSharding(sharding.mesh, spec))
    placed = NamedSharding(sharding.mesh, PartitionSpec(parts.names, *spec))
    return jnp.broadcast_to(x, shape, out_sharding=placed)


def _where_parts_are(x: Any, parts: PartsOf, split: Split = ()) -> Any:
    """A value with the parts in front, which XLA is told to split, where the mesh is known.

    Args:
        x: The value.
        parts: The parts.
        split: How each part is split over other mesh axes, where that is known; else XLA decides.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not set(parts.names) <= set(mesh.auto_axes):
        return x
    others = set(mesh.auto_axes) - set(parts.names)
    rest: list[Any] = [PartitionSpec.UNCONSTRAINED for _ in x.shape[1:]]
    for at, names in enumerate(split):
        names = tuple(name for name in names if name in others)
        if names and x.shape[1 + at] % math.prod(mesh.shape[name] for name in names) == 0:
            rest[at] = names
    return jax.lax.with_sharding_constraint(x, PartitionSpec(parts.names, *rest))


def _on_explicit_axes(values: Sequence[Any], names: tuple[str, ...]) -> list[Any]:
    """Values with the parts in front; on explicit axes all of them must lie there.

    Counts and constants lie on no mesh. Random bits, which are drawn outside of the region, are
    whole on each device.
    """
    shardings = [jax.typeof(x).sharding for x in values]
    meshes = (s.mesh for s in shardings if s.spec and names_of(s.spec[0]) == names)
    mesh = next(meshes, jax.sharding.get_abstract_mesh())
    if not set(names) <= set(mesh.explicit_axes):
        return list(values)

    def placed(x: Any) -> Any:
        spec = jax.typeof(x).sharding.spec
        if names_of(spec[0]) == names:
            return x
        spec = PartitionSpec(names, *without_axes(spec, names)[1:])
        return jax.sharding.reshard(x, NamedSharding(mesh, spec))

    return list(map(placed, values))


def _sum_of_parts(x: Any) -> Any:
    return jnp.sum(x, axis=0, dtype=raised(x.dtype)).astype(x.dtype)


def region_alone(slices: Slices, results: Sequence[Any]) -> tuple[Program, dict[int, int]]:
    """Return a region as a program of its own, and where its inputs are cut.

    The cheap values that it makes inside are in the program, and zeros that it sums onto. Where
    nothing is left that is cut, the seeds of the slices are made outside: the basis of a Hessian.

    Args:
        slices: What runs on slices.
        results: Values that others read.
    """
    program = slices.program
    run = {step.position for step in slices.steps}
    run |= {p for q in run for p in zeros_below(program, program.eqns[q])}
    cut = slices.given
    if not cut:
        cut = slices.seeds
        run -= {program.producer[v] for v, _ in cut}
    alone = Program(program.cut(run, results))
    position = {v: i for i, v in enumerate(alone.jaxpr.invars)}
    return alone, {position[v]: at for v, at in cut if v in position}


def parts_of(inputs: Sequence[Any], split: SplitValues) -> list[PartsOf]:
    """Return how devices split what a region reads, for each set of mesh axes; the data alone.

    Args:
        inputs: What it reads.
        split: How devices split the values of the program that the region is of.
    """
    weights = {i: split.of(v) for i, v in enumerate(inputs) if v not in split.data}
    weights = {i: names for i, names in weights.items() if any(names)}
    found: dict[tuple[tuple[int, int], ...], list[str]] = {}
    for name in split.names:
        axes = tuple(
            (i, at)
            for i, v in enumerate(inputs)
            if v in split.data
            for at, names in enumerate(split.of(v))
            if name in names
        )
        if axes:
            found.setdefault(axes, []).append(name)
    return [
        PartsOf(dict(axes), math.prod(split.names[name] for name in names), tuple(names), weights)
        for axes, names in found.items()
    ]


def sharded_region(
    program: Program, axes: Mapping[int, int], parts: Sequence[PartsOf]
) -> ShardedRegion:
    """Return the program on slices, in those parts that compute them by themselves.

    Args:
        program: As for `ShardedRegion`.
        axes: Likewise.
        parts: Parts, of which those are left out that depend on each other.
    """
    found = ShardedRegion(program, axes)
    for each in parts:
        with contextlib.suppress(Dependent, ValueError):
            found = ShardedRegion(program, axes, [*found.parts, each])
    return found
