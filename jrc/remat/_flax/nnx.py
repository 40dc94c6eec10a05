"""flax nnx modules whose methods are regions.

nnx splits a graph of modules into a tree of arrays, and merges it inside the region. Changes that
the method makes there are then written to the module outside.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jrc.remat._flax.module_region import (
    ModuleOptions,
    call_region,
    class_attributes,
    plain_class,
    unwrap_static,
    view_as_class,
    view_as_plain,
    wrap_static,
)

Module = nnx.Module
_TAG = "jrc.recompute_module"


def of_instance(module: Module, options: ModuleOptions) -> Module:
    """Return a view of the module as one of the recomputed class; attributes are shared."""
    cls = of_class(type(module), options)
    return module if type(module) is cls else view_as_class(module, cls)


def of_class(cls: type[Module], options: ModuleOptions) -> type[Module]:
    """Return the recomputed class, the same one for equal options."""
    return _subclass(plain_class(cls), options)


@functools.cache
def _subclass(cls: type[Module], options: ModuleOptions) -> type[Module]:
    methods = {name: _region_method(getattr(cls, name), options) for name in options.methods}
    # A class that is no pytree needs `pytree=False` in every subclass.
    base = {} if getattr(cls, "_pytree__is_pytree", True) else {"pytree": False}
    return type(cls)(cls.__name__, (cls,), methods | class_attributes(cls), **base)


def _region_method(method: Callable[..., Any], options: ModuleOptions) -> Callable[..., Any]:
    """Return a method that is one region."""

    @functools.wraps(method)
    def call(self: Module, *args: Any, **kwargs: Any) -> Any:
        # As pairs, because JAX sorts the keys of a dict.
        inputs = (view_as_plain(self), wrap_static(args, options), tuple(kwargs.items()))
        return _call(method, inputs, options)

    return call


def _call(method: Callable[..., Any], inputs: tuple[Any, ...], options: ModuleOptions) -> Any:
    """Return the method's result; write its changes to the module and the arguments."""
    changed: list[bool] = []

    def pure(*trees: Any) -> Any:
        inside = nnx.from_tree(trees, ctxtag=_TAG, is_inner=True)
        before = _content(inside)
        module, args, kwargs = inside
        out = method(module, *unwrap_static(args), **dict(kwargs))
        changed.append(bool(_graphs(out)) or _differ(before, _content(inside)))
        return nnx.to_tree((inside, out), ctxtag=_TAG)

    with nnx.update_context(_TAG):
        after = call_region(pure, nnx.to_tree(inputs, ctxtag=_TAG), options)
        # nnx forbids writing to a module of an outer trace, even the values that it has.
        if any(changed):
            after = nnx.from_tree(after, ctxtag=_TAG, is_inner=False)
    return after[1]


def _graphs(tree: Any) -> list[Any]:
    """Return the modules, variables and other nnx nodes of a tree."""
    is_graph = nnx.graphlib.is_graph_node
    return [x for x in jax.tree.leaves(tree, is_leaf=is_graph) if is_graph(x)]


def _content(tree: Any) -> tuple[Any, list[Any]]:
    """Return all that can change in a tree: the structure of its modules, and their values."""
    graph, state = nnx.split(_graphs(tree))
    return graph, jax.tree.leaves(state)


def _differ(before: tuple[Any, list[Any]], after: tuple[Any, list[Any]]) -> bool:
    """Return whether two contents of a tree differ, values compared by identity."""
    (graph, values), (new_graph, new_values) = before, after
    if graph != new_graph or len(values) != len(new_values):
        return True
    return any(x is not y for x, y in zip(values, new_values, strict=True))
