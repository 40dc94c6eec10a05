"""Atoms of a jaxpr: variables, which a program is given or computes, and literals."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import jax
from jax.extend.core import Literal, Var
from jax.sharding import NamedSharding

from jrc._specs import axes_of
from jrc._tree import varying_axes


def is_atom(x: Any) -> bool:
    """Return whether this is an atom of a program, and no value."""
    return isinstance(x, Var | Literal)


def is_variable(x: Any) -> TypeGuard[Var]:
    """Return whether this is a variable of a program, and no literal."""
    return isinstance(x, Var)


def is_ref(atom: Any) -> bool:
    """Return whether an atom is a `jax.Ref`, which equations write to."""
    return hasattr(atom.aval, "inner_aval")


def variables(atoms: Iterable[Any]) -> Iterator[Var]:
    """Yield the variables among atoms."""
    return (atom for atom in atoms if isinstance(atom, Var))


def shape_of(atom: Any) -> tuple[int, ...]:
    """Return the shape of a variable or a literal; a token has none."""
    return tuple(getattr(atom.aval, "shape", ()))


def abstract(atom: Any) -> Any:
    """Return the shape and dtype of a variable or a literal, and its split over explicit axes.

    Inside of a `shard_map` it also has the axes that its values vary over.
    """
    if varying_axes(atom):
        return atom.aval.update(weak_type=False)
    sharding = getattr(atom.aval, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not axes_of(sharding.spec):
        sharding = None
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype, sharding=sharding)


def substitute(atoms: Sequence[Any], new: Mapping[Any, Any]) -> list[Any]:
    """Return the atoms, each variable replaced by what it maps to; literals stay."""
    return [atom if isinstance(atom, Literal) else new.get(atom, atom) for atom in atoms]
