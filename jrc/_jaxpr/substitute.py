"""Substitution of atoms: the one place where a variable is replaced in a list of atoms."""

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import Literal


def substitute(atoms: Sequence[Any], new: Mapping[Any, Any]) -> list[Any]:
    """Return the atoms, each variable replaced by what it maps to; literals stay."""
    return [atom if isinstance(atom, Literal) else new.get(atom, atom) for atom in atoms]
