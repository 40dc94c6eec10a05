"""What both kinds of flax modules share: a call as one region, and a second face of a module.

>>> import jax.numpy as jnp
>>> call_region(lambda x, train: {"mode": train, "y": x * 2}, (jnp.ones(2), True), Request())
{'mode': True, 'y': Array([2., 2.], dtype=float32)}
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

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
    """How a module's methods are re-run; hashable, so that one request makes one class.

    Attributes:
        keep: The rule for values that are held inside the region.
        recompute_collectives: Whether collectives are re-run too.
        static_argnums: Positions, behind `self`, of arguments that no region may trace.
        methods: The methods that become regions.
    """

    keep: Rule | None = None
    recompute_collectives: bool = False
    static_argnums: tuple[int, ...] = ()
    methods: tuple[str, ...] = ("__call__",)

    @property
    def policy(self) -> Policy:
        """The rules, ready to be asked."""
        return Policy(self.keep, not self.recompute_collectives)


@dataclasses.dataclass(frozen=True, eq=False)
class _Static:
    """An argument that stays what it is: to JAX this is one leaf that is no array."""

    value: Any


def wrap_static(args: Sequence[Any], options: ModuleOptions) -> tuple[Any, ...]:
    """The arguments, with those that no region may trace wrapped up."""
    return tuple(_Static(x) if i in options.static_argnums else x for i, x in enumerate(args))


def unwrap_static(args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments as the user gave them."""
    return tuple(x.value if isinstance(x, _Static) else x for x in args)


def call_region(fn: Callable[..., Any], args: Sequence[Any], options: ModuleOptions) -> Any:
    """Call a function of pytrees as one region; leaves that are no JAX arrays stay outside it.

    The function itself runs once, now: what is re-run is its program. A counter that it advances
    (the random streams of flax) is advanced once.
    """
    traced = trace(fn, tuple(args), {}, should_inline(options.policy))
    check_policy(options.policy, traced.program, "jrc.recompute_module", "the module")
    return traced.run(_changing(traced.program, options.policy))


def _changing(program: Program, policy: Policy) -> Callable[..., list[Any]]:
    """The program as a region that makes only what is new: inputs handed through go around it.

    A module's state comes out whole, its parameters too. As results of the region they would be
    copies, which a second call of the module then keeps beside the originals.
    """
    jaxpr = program.jaxpr
    given = {id(var): i for i, var in enumerate(jaxpr.invars)}
    made = Program(jaxpr.replace(outvars=[v for v in jaxpr.outvars if id(v) not in given]))
    cuts = one_segment(made, policy)

    def run(*inputs: Any) -> list[Any]:
        new = iter(run_sections(made, cuts, inputs))
        return [inputs[given[id(v)]] if id(v) in given else next(new) for v in jaxpr.outvars]

    return run


def class_attributes(cls: type) -> dict[str, Any]:
    """What a recomputed class says of itself: all names are the plain class's."""
    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return {**names, _PLAIN: cls}


def plain_class(cls: type) -> type:
    """The class that `cls` is the recomputed form of; a subclass of such a form is its own."""
    return vars(cls).get(_PLAIN, cls)


def view_as_class(module: Any, cls: type) -> Any:
    """The same module as an object of another class: there is one set of attributes.

    With it a method can be called as a region from outside, and plainly inside the region.
    """
    other = object.__new__(cls)
    object.__setattr__(other, "__dict__", vars(module))
    return other


def view_as_plain(module: Any) -> Any:
    """The module as its class was before recomputation, if it is of a recomputed class."""
    cls = plain_class(type(module))
    return module if cls is type(module) else view_as_class(module, cls)
