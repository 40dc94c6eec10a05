"""Return and write changes of flax nnx variables in arguments: key counts, running means.

A jaxpr has no side effects on Python objects, so the new values become results of the program, and
are written to the variables after it ran.
"""

import collections
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

Changes = Mapping[int, list[Any]]


def with_changes(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function that also returns the new leaves of every variable that `fn` changes.

    Args:
        fn: The function.
        name: Its name, for the error.

    Raises:
        ValueError: When called, if `fn` adds or removes variables of its arguments.
    """

    def changing(*args: Any, **kwargs: Any) -> tuple[Any, dict[int, list[Any]]]:
        before = [jax.tree.leaves(each) for each in _variables((args, kwargs))]
        out = fn(*args, **kwargs)
        after = [jax.tree.leaves(each) for each in _variables((args, kwargs))]
        if [len(old) for old in before] != [len(new) for new in after]:
            raise ValueError(
                f"`{name}` must not add or remove variables of a flax nnx module among its "
                f"arguments, got {len(before)} before the call and {len(after)} after it. Add them "
                "before planning, or call nnx.split and return the new state."
            )
        pairs = enumerate(zip(before, after, strict=True))
        return out, {i: new for i, (old, new) in pairs if not _same(old, new)}

    return changing


def write_changes(args: Any, changes: Changes, name: str) -> None:
    """Write new leaves of variables into the arguments' variables.

    Raises:
        ValueError: If a changed variable occurs twice in the arguments.
    """
    refuse_shared(args, changes, name)
    variables = _variables(args) if changes else []
    for i, leaves in changes.items():
        new = jax.tree.unflatten(jax.tree.structure(variables[i]), leaves)
        variables[i].set_value(new.get_value())


def refuse_shared(args: Any, changed: Iterable[int], name: str) -> None:
    """Raise a `ValueError` if a variable that changes occurs twice in the arguments.

    Args:
        args: The arguments.
        changed: The numbers of the variables that change.
        name: The function's name, for the error.
    """
    changed = list(changed)
    variables = _variables(args) if changed else []
    times = collections.Counter(map(id, variables))
    for i in changed:
        if times[id(variables[i])] > 1:
            raise ValueError(
                f"`{name}` must not change a variable that two modules share, got a "
                f"{type(variables[i]).__name__}, which a plan sees twice. Give each module its "
                "own, or call nnx.split and return the new state."
            )


def _variables(tree: Any) -> list[Any]:
    """Return the nnx variables of a tree; there are none if nnx was never imported."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return []
    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    return [x for x in jax.tree.leaves(tree, is_leaf=is_variable) if is_variable(x)]


def _same(old: list[Any], new: list[Any]) -> bool:
    return all(a is b for a, b in zip(old, new, strict=True))
