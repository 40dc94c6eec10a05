"""`jrc.recompute_module`: a flax module as one recomputed region."""

import functools
import inspect
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

from jrc._errors import close_to, listed, public
from jrc._optional import needed
from jrc._validate import check_flag, is_whole
from jrc.remat._flax.module_region import ModuleOptions
from jrc.remat._policy.rules import Rule, check_keep


@public("jrc.recompute_module")
def recompute_module[M](
    module: M,
    *,
    keep: Rule | None = None,
    recompute_collectives: bool = False,
    static_argnums: int | Sequence[int] = (),
    methods: Sequence[str] | None = None,
) -> M:
    """Make a flax module one region: its output is saved, all inside is recomputed.

    Parameters keep their names and paths, so saved ones fit with and without it. Statistics are
    updated once, and the recomputation draws the same random bits as the first run, those of the
    plain module. Leaves of the arguments that are no JAX arrays (`train=True`, strings, `None`)
    are passed to the module as they are.

    For a linen instance it returns a new one with the same fields, name and parent. For an nnx
    instance it returns a second object that shares all attributes and variables, so replace the
    plain one: `model.block = jrc.recompute_module(model.block)`. For a class it returns a subclass
    of the same name. A module that is recomputed already is returned as it is; other options
    replace its options.

    Args:
        module: A flax linen or nnx module: an instance, a class, or a `functools.partial` of one.
        keep: Rules for values inside that are saved too, such as `jrc.SavePrimitives("tanh")`;
            `None` saves only the output.
        recompute_collectives: Whether the backward pass recomputes collectives.
        static_argnums: Positions, not counting `self`, of arguments whose arrays are not traced,
            because Python code reads their values.
        methods: Names of the methods that become regions, `("__call__",)` by default. One that
            another of them calls is part of the caller's region.

    Returns:
        The module in the form in which it was passed.

    Raises:
        TypeError: If `module` is no flax module, `keep` is no rule, `methods` is no sequence of
            strings or `static_argnums` holds anything else than integers.
        ValueError: If the module has no such method, or a position is negative.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import linen as nn
        >>> class Block(nn.Module):
        ...     @nn.compact
        ...     def __call__(self, x, train):
        ...         x = nn.Dropout(0.5, deterministic=not train)(nn.relu(nn.Dense(8)(x)))
        ...         return nn.Dense(2)(x)
        >>> block, x = jrc.recompute_module(Block()), jnp.ones((4, 2))
        >>> params = block.init(jax.random.key(0), x, train=False)
        >>> def loss(params, key):
        ...     return jnp.mean(block.apply(params, x, train=True, rngs={"dropout": key}) ** 2)
        >>> jax.grad(loss)(params, jax.random.key(1))["params"]["Dense_1"]["kernel"].shape
        (8, 2)

    Source: MindSpore `nn/cell.py`, `Cell.recompute`; flax `linen.remat` and `nnx.remat`.
    """
    if isinstance(module, functools.partial):
        inner = recompute_module(
            module.func,
            keep=keep,
            recompute_collectives=recompute_collectives,
            static_argnums=static_argnums,
            methods=methods,
        )
        return functools.partial(inner, *module.args, **module.keywords)  # type: ignore[return-value]
    check_keep(keep)
    check_flag(recompute_collectives, "recompute_collectives")
    cls = module if inspect.isclass(module) else type(module)
    flavour = _flavour(cls, module)
    options = ModuleOptions(
        keep, recompute_collectives, _positions(static_argnums), _methods(cls, methods)
    )
    of = flavour.of_class if inspect.isclass(module) else flavour.of_instance
    return of(module, options)


def _flavour(cls: type, module: Any) -> ModuleType:
    """Return the module `linen` or `nnx` of this package, by the kind of the user's module.

    flax is slow to import: it is imported here, at the first use.
    """
    needed("flax")
    from jrc.remat._flax import linen, nnx

    for flavour in (linen, nnx):
        if issubclass(cls, flavour.Module):
            return flavour
    name = getattr(module, "__name__", None)
    raise TypeError(
        "module must be a flax linen or nnx module or class, got "
        f"{cls.__name__}{f' {name!r}' if name else ''}. For a function write "
        "jrc.recompute(function, *args)."
    )


def _positions(static_argnums: Any) -> tuple[int, ...]:
    """Return `static_argnums` as sorted positions, after checking them."""
    given = static_argnums if isinstance(static_argnums, Iterable) else (static_argnums,)
    positions = tuple(given)
    if not all(map(is_whole, positions)):
        raise TypeError(
            f"static_argnums must be whole numbers, got {static_argnums!r}. "
            "Write positions, counted from 0 after self; train=True needs none."
        )
    if any(i < 0 for i in positions):
        raise ValueError(
            "static_argnums must be counted from 0 after self, got "
            f"{static_argnums!r}. Write the position from the front."
        )
    return tuple(sorted({int(i) for i in positions}))


def _methods(cls: type, methods: Any) -> tuple[str, ...]:
    """Return `methods` as sorted names, after checking that the class has them."""
    names = ("__call__",) if methods is None else methods
    listable = isinstance(names, Iterable) and not isinstance(names, str)
    if not listable or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"methods must be a sequence of names, got {methods!r}. "
            "Write methods=['encode', 'decode']."
        )
    if not names:
        raise ValueError(
            f"methods must have at least one name, got {methods!r}. Leave it out for __call__."
        )
    for name in names:
        if not callable(getattr(cls, name, None)):
            known = [name for name in vars(cls) if callable(getattr(cls, name))]
            raise ValueError(
                f"methods must be methods of {cls.__name__}, got {name!r}"
                f"{close_to(name, known)}. It defines {listed(known)}."
            )
    return tuple(sorted(set(names)))
