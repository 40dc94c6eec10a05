"""flax linen modules whose methods are regions.

flax's lifting turns all variables and random streams of a module into trees and back. The region
is between the two, where `nn.remat` has `jax.checkpoint`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from flax import linen as nn
from flax.core import lift
from flax.linen.transforms import lift_transform

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

Module = nn.Module


def of_instance(module: Module, options: ModuleOptions) -> Module:
    """Return a module of the recomputed class with the same fields, name and parent."""
    cls = of_class(type(module), options)
    if type(module) is cls:
        return module
    if module.scope is not None:
        # Its name in the parameter tree is taken, so a new module could not have it. Submodules
        # have a weak reference to the first object: the attributes keep it alive.
        vars(module)["_jrc_first"] = module
        return view_as_class(module, cls)
    fields = [f.name for f in dataclasses.fields(module) if f.init and f.name != "parent"]
    return cls(parent=module.parent, **{name: getattr(module, name) for name in fields})


def of_class(cls: type[Module], options: ModuleOptions) -> type[Module]:
    """Return the recomputed class, the same one for equal options."""
    return _subclass(plain_class(cls), options)


@functools.cache
def _subclass(cls: type[Module], options: ModuleOptions) -> type[Module]:
    methods = {name: _region_method(getattr(cls, name), options) for name in options.methods}
    # The name is kept: flax derives the names of parameters from it.
    return type(cls)(cls.__name__, (cls,), methods | class_attributes(cls))


def _region_method(method: Callable[..., Any], options: ModuleOptions) -> Callable[..., Any]:
    """Return a method that is one region."""

    @functools.wraps(method)
    def plain_method(module: Module, *args: Any, **kwargs: Any) -> Any:
        return method(view_as_plain(module), *args, **kwargs)

    return lift_transform(functools.partial(_lifted, options=options), plain_method)


def _lifted(fn: Callable[..., Any], options: ModuleOptions) -> Callable[..., Any]:
    """Return a function of scopes that is one region."""

    def inner(scope_fn: Any, repack_fn: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any):
        def pure(variables: Any, rngs: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
            scope = scope_fn(variables, rngs)
            return fn(scope, *unwrap_static(args), **dict(kwargs)), repack_fn(scope)

        # As pairs, because JAX sorts the keys of a dict.
        trees = (variables, rngs, wrap_static(args, options), tuple(kwargs.items()))
        return call_region(pure, trees, options)

    return lift.pack(inner, (True,), (True,), (True,), name="recompute", enable_kwargs=True)
