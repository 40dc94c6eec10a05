"""Code for both kinds of flax modules: a call as one region, and views of a module.

>>> import jax.numpy as jnp
>>> call_region(lambda x, train: {"mode": train, "y": x * 2}, (jnp.ones(2), True), ModuleOptions())
{'mode': True, 'y': Array([2., 2.], dtype=float32)}
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jrc._errors import public
from jrc._jaxpr import Program, trace
from jrc.remat._policy.check import check_policy
from jrc.remat._policy.resolution import Policy
from jrc.remat._policy.rules import Rule
from jrc.remat._region.region import should_inline
from jrc.remat._segments.cut import one_segment
from jrc.remat._segments.run_sections import run_sections

_PLAIN = "_jrc_plain"


@dataclasses.dataclass(frozen=True)
class ModuleOptions:
    """How a module's methods are recomputed; hashable, so that equal options make one class.

    Attributes:
        keep: The rule for values that are saved inside the region.
        recompute_collectives: Whether collectives are recomputed too.
        static_argnums: Positions after `self` of arguments that are not traced.
        methods: The names of the methods that become regions.
    """

    keep: Rule | None = None
    recompute_collectives: bool = False
    static_argnums: tuple[int, ...] = ()
    methods: tuple[str, ...] = ("__call__",)

    @property
    def policy(self) -> Policy:
        """The policy of the region."""
        return Policy(self.keep, not self.recompute_collectives)


@dataclasses.dataclass(frozen=True, eq=False)
class _Static:
    """An argument that is not traced: for JAX it is one leaf that is no array."""

    value: Any


def wrap_static(args: Sequence[Any], options: ModuleOptions) -> tuple[Any, ...]:
    """Return the arguments, the static ones wrapped so that they are not traced."""
    return tuple(_Static(x) if i in options.static_argnums else x for i, x in enumerate(args))


def unwrap_static(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments as the user passed them."""
    return tuple(x.value if isinstance(x, _Static) else x for x in args)


@public("jrc.recompute_module")
def call_region(fn: Callable[..., Any], args: Sequence[Any], options: ModuleOptions) -> Any:
    """Call a function of pytrees as one region; leaves that are no JAX arrays are not traced.

    Python calls the function once in each trace, for its program; the region is that program. A
    counter that the function advances (the random streams of flax) is advanced once.
    """
    traced = trace(fn, tuple(args), {}, should_inline(options.policy))
    check_policy(options.policy, traced.program, "the module")
    return traced.run(_without_copies(traced.program, options.policy))


def _without_copies(program: Program, policy: Policy) -> Callable[..., list[Any]]:
    """Return the program as a region of which inputs that are results too are no part.

    A module returns its whole state, parameters included. As results of the region they would be
    copies, which a second call of the module would save beside the originals.
    """
    jaxpr = program.jaxpr
    index = {id(var): i for i, var in enumerate(jaxpr.invars)}
    region = Program(jaxpr.replace(outvars=[v for v in jaxpr.outvars if id(v) not in index]))
    sections = one_segment(region, policy)

    def run(*inputs: Any) -> list[Any]:
        new = iter(run_sections(region, sections, inputs))
        return [inputs[index[id(v)]] if id(v) in index else next(new) for v in jaxpr.outvars]

    return run


def class_attributes(cls: type) -> dict[str, Any]:
    """Return the attributes of a recomputed class: the names of the plain one, and a link to it."""
    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return {**names, _PLAIN: cls}


def plain_class(cls: type) -> type:
    """Return the class that `cls` is the recomputed form of, or `cls` itself.

    A subclass of a recomputed class is a class of its own.
    """
    return vars(cls).get(_PLAIN, cls)


def view_as_class(module: Any, cls: type) -> Any:
    """Return an object of another class that shares all attributes with a module.

    Its methods are regions where the module's own ones are not, or the other way round.
    """
    other = object.__new__(cls)
    object.__setattr__(other, "__dict__", vars(module))
    return other


def view_as_plain(module: Any) -> Any:
    """Return a view of a module as its plain class; the module itself if it is of a plain one."""
    cls = plain_class(type(module))
    return module if cls is type(module) else view_as_class(module, cls)
