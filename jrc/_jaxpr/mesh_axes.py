"""The mesh axes that each dimension of a program's values is split over, as far as it can be known.

XLA decides how most values lie on a mesh. Here the arguments' shardings and the constraints of the
program are followed along independent axes, as XLA does it; explicit axes are read from types.

>>> import jax, jax.numpy as jnp
>>> layer = lambda w, x: jnp.tanh(x @ w).T
>>> program = Program(jax.make_jaxpr(layer)(jnp.ones((4, 6)), jnp.ones((8, 4))))
>>> w, x = program.jaxpr.invars
>>> given = {w: ((), ("model",)), x: (("data",), ())}
>>> split = SplitValues(program, given, data=[x], names={"data": 4})
>>> split.of(program.jaxpr.outvars[0])
(('model',), ('data',))
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec

from jrc._jaxpr.atoms import is_variable, shape_of
from jrc._jaxpr.control_flow import inputs_of_programs, loop_parts
from jrc._jaxpr.equations import sharding_of
from jrc._jaxpr.independent_axes import independent_axes
from jrc._jaxpr.program import Program
from jrc._specs import names_of

Split = tuple[tuple[str, ...], ...]
"""Of each dimension of a value, the mesh axes that it is split over."""


class SplitValues:
    """How the values of a program are split over a mesh.

    Args:
        program: The program, without `jit` calls.
        given: How its inputs are split, as far as it is known.
        data: The inputs that are no parameters: where both could split a dimension, these do.
        names: The mesh axes that split data, each with its size.

    Attributes:
        data: The values that depend on data.
        names: As given.
    """

    def __init__(
        self,
        program: Program,
        given: Mapping[Any, Split],
        data: Iterable[Any],
        names: Mapping[str, int],
    ) -> None:
        self.data, self.names = set(data), names
        self._splits: dict[Any, Split] = {}
        for v in program.jaxpr.invars:
            self._set(v, given.get(v) or _whole(v))
        for eqn in program.eqns:
            self._follow(eqn)

    def of(self, v: Any) -> Split:
        """Return how a value is split."""
        return self._splits.get(v) or _whole(v)

    def of_program(self, program: Program) -> "SplitValues":
        """Return how the values of a program of the same inputs are split."""
        inputs = program.jaxpr.invars
        data = self.data.intersection(inputs)
        return SplitValues(program, {v: self.of(v) for v in inputs}, data, self.names)

    def inside(self, eqn: JaxprEqn, body: Program) -> "SplitValues":
        """Return how the values of a program inside of an equation are split.

        Args:
            eqn: A loop, a conditional or a `jax.checkpoint` region of the program.
            body: Its body, a branch, or what it computes.
        """
        operands = inputs_of_programs(eqn)
        is_loop = eqn.primitive.name == "scan"
        consts, carried = loop_parts(eqn) if is_loop else (len(operands), 0)
        given: dict[Any, Split] = {}
        data = []
        for i, (v, x) in enumerate(zip(body.jaxpr.invars, operands, strict=True)):
            split = self.of(x) if is_variable(x) else _whole(x)
            is_data = is_variable(x) and x in self.data
            if consts <= i < consts + carried:
                after = eqn.outvars[i - consts]
                split = split if any(split) else self.of(after)
                is_data = is_data or after in self.data
            given[v] = split if i < consts + carried else split[1:]
            data += [v] if is_data else []
        return SplitValues(body, given, data, self.names)

    def _follow(self, eqn: JaxprEqn) -> None:
        operands = [x for x in eqn.invars if is_variable(x)]
        if not self.data.isdisjoint(operands):
            self.data.update(eqn.outvars)
        constraint = sharding_of(eqn)
        if constraint is not None:
            (out,), (x, *_) = eqn.outvars, eqn.invars
            self._set(out, split_of_spec(constraint.spec, self.of(x) if is_variable(x) else ()))
            return
        splits = [list(_whole(v)) for v in eqn.outvars]
        known = independent_axes(eqn) if any(any(self.of(x)) for x in operands) else ()
        for of_data in (True, False):
            for axis in known:
                names = self._names(eqn, axis.operands, of_data)
                for split, at in zip(splits, axis.results, strict=True):
                    if at is not None and not split[at]:
                        split[at] = _unused(names, split)
        if not known:
            splits = [self._as_an_operand(v, operands) for v in eqn.outvars]
        for v, split in zip(eqn.outvars, splits, strict=True):
            self._set(v, tuple(split))

    def _names(self, eqn: JaxprEqn, places: Sequence[int | None], of_data: bool) -> tuple[str, ...]:
        """The mesh axes of the first operand that is split along an axis."""
        for x, at in zip(eqn.invars, places, strict=True):
            if at is not None and is_variable(x) and (x in self.data) == of_data:
                names = self.of(x)[at]
                if names:
                    return names
        return ()

    def _as_an_operand(self, v: Any, operands: Sequence[Any]) -> list[tuple[str, ...]]:
        """Like an operand of the same shape, where nothing is known of the equation."""
        alike = (x for x in operands if shape_of(x) == shape_of(v) and x in self.data)
        return list(next(map(self.of, alike), _whole(v)))

    def _set(self, v: Any, split: Split) -> None:
        """Note how a value is split; what its type says of explicit axes comes first."""
        sharding = getattr(v.aval, "sharding", None)
        explicit = split_of_spec(getattr(sharding, "spec", PartitionSpec()), _whole(v))
        if any(explicit):
            merged = list(explicit)
            for i, names in enumerate(split):
                merged[i] = merged[i] or _unused(names, merged)
            split = tuple(merged)
        if any(split):
            self._splits[v] = split


def split_of_spec(spec: PartitionSpec, otherwise: Split) -> Split:
    """Return the mesh axes of each dimension.

    Args:
        spec: How a value is split.
        otherwise: How it is split where the spec leaves that open, of as many dimensions.
    """
    entries = [*spec, *(None for _ in range(len(otherwise) - len(spec)))]
    return tuple(
        old if entry is PartitionSpec.UNCONSTRAINED else names_of(entry)
        for entry, old in zip(entries, otherwise, strict=True)
    )


def _unused(names: Sequence[str], split: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The mesh axes that split no other dimension."""
    used = {name for each in split for name in each}
    return tuple(name for name in names if name not in used)


def _whole(x: Any) -> Split:
    return tuple(() for _ in shape_of(x))
