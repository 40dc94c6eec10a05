"""What a function changes in flax nnx modules that it is given: counts of keys, running means.

A program has results and no effects, so the new values are results of it, which are then written
where they belong.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax

Changes = Mapping[int, list[Any]]


def with_changes(fn: Callable[..., Any], name: str, who: str) -> Callable[..., Any]:
    """The function, returning also the new leaves of every variable that it changed, by number."""

    def changing(*args: Any, **kwargs: Any) -> tuple[Any, dict[int, list[Any]]]:
        before = [jax.tree.leaves(each) for each in _variables((args, kwargs))]
        out = fn(*args, **kwargs)
        after = [jax.tree.leaves(each) for each in _variables((args, kwargs))]
        if [len(old) for old in before] != [len(new) for new in after]:
            raise ValueError(
                f"{who}: `{name}` adds variables to a flax nnx module that it is given, or takes "
                "some away; a plan can change those that are there. Add them before, or take the "
                "module apart with nnx.split and return what is new."
            )
        pairs = enumerate(zip(before, after, strict=True))
        return out, {i: new for i, (old, new) in pairs if not _same(old, new)}

    return changing


def write_changes(args: Any, changes: Changes, name: str, who: str) -> None:
    """Write new leaves of variables into those of the arguments."""
    variables = _variables(args) if changes else []
    numbers = [id(each) for each in variables]
    for i, leaves in changes.items():
        if numbers.count(numbers[i]) > 1:
            raise ValueError(
                f"{who}: `{name}` changes a {type(variables[i]).__name__} that two modules share; "
                "a plan sees it as two. Give each its own, or take the module apart with nnx.split."
            )
        new = jax.tree.unflatten(jax.tree.structure(variables[i]), leaves)
        variables[i].set_value(new.get_value())


def _variables(tree: Any) -> list[Any]:
    """The variables of nnx in a tree; none can be where it was not imported."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return []
    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    return [x for x in jax.tree.leaves(tree, is_leaf=is_variable) if is_variable(x)]


def _same(old: list[Any], new: list[Any]) -> bool:
    return all(a is b for a, b in zip(old, new, strict=True))
