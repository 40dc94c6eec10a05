"""The arguments of a function whose gradient is looked at, taken apart, and what it returns.

>>> import jax.numpy as jnp
>>> args = {"w": jnp.ones(3), "step": 4}, "train"
>>> apart = arguments_of(print, args, 0, "here", numbers=True)
>>> apart.moving, apart.arrays, apart.filled(["the step", "the weights"])
((1,), (0, 1), ({'step': 'the step', 'w': 'the weights'}, 'train'))
"""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrc._errors import name_of
from jrc._tree import is_floating, is_number, is_traced

# What JAX raises where a traced value is needed as a number.
_NEEDS_A_NUMBER = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.TracerArrayConversionError,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Arguments:
    """The leaves of a function's arguments, and which of them are what.

    Attributes:
        leaves: All of them; those that are arrays as JAX arrays or shapes.
        treedef: How they hang together.
        arrays: Which of them a program of the function is given, by number.
        moving: Which of these are differentiated: the floating ones of some arguments.
        name: What the user calls the function.
        who: For whom errors speak.
    """

    leaves: tuple[Any, ...]
    treedef: Any
    arrays: tuple[int, ...]
    perturbed: tuple[int, ...]
    name: str
    who: str

    def of(self, numbers: Sequence[int]) -> list[Any]:
        """The leaves with these numbers."""
        return [self.leaves[i] for i in numbers]

    def filled(self, values: Sequence[Any], numbers: Sequence[int] | None = None) -> Any:
        """The arguments with other leaves: of all arrays, or of those with these numbers."""
        new = list(self.leaves)
        for i, x in zip(self.arrays if numbers is None else numbers, values, strict=True):
            new[i] = x
        return self.treedef.unflatten(new)

    def result(self, out: Any, has_aux: bool) -> tuple[Any, list[Any]]:
        """The loss and the leaves of what else the function returned."""
        return _result(out, has_aux, self.who, self.name)

    def gradient(self, fn: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
        """Value and gradients of a function by the moving leaves, as a function of all arrays."""

        def run(*arrays: Any) -> Any:
            values = dict(zip(self.arrays, arrays, strict=True))

            def at(moved: Sequence[Any]) -> tuple[Any, list[Any]]:
                new = values | dict(zip(self.perturbed, moved, strict=True))
                out = call_checked(fn, self.filled(list(new.values()), list(new)), {}, self.who)
                value, more = self.result(out, has_aux)
                return value, [x for x in more if is_number(x)]

            return jax.value_and_grad(at, has_aux=True)([values[i] for i in self.perturbed])

        return run

    def traced(self, fn: Callable[..., Any], has_aux: bool) -> Any:
        """The program of value and gradients."""
        return jax.make_jaxpr(self.gradient(fn, has_aux))(*self.of(self.arrays))

    def lowered(self, fn: Callable[..., Any], has_aux: bool) -> jax.stages.Lowered:
        """The same, lowered."""
        return jax.jit(self.gradient(fn, has_aux)).lower(*self.of(self.arrays))


def arguments_of(
    fn: Any,
    args: tuple[Any, ...],
    argnums: int | Sequence[int],
    who: str,
    *,
    numbers: bool = False,
) -> Arguments:
    """Take arguments apart; errors speak for `who`.

    Of the arguments `argnums` every floating leaf moves. JAX arrays, shapes and NumPy's arrays are
    inputs of the program, and with `numbers` so are Python's numbers; all else stays what it is.
    """
    chosen = _checked(fn, args, argnums, who)
    name = name_of(inspect.unwrap(fn))
    paths, treedef = jax.tree_util.tree_flatten_with_path(args)
    leaves = [leaf for _, leaf in paths]
    moves = [(chosen.index(path[0].idx), i) for i, (path, leaf) in enumerate(paths)
             if path[0].idx in chosen and _can_move(leaf)]  # fmt: skip
    perturbed = tuple(i for _, i in sorted(moves))
    is_given = is_input if not numbers else lambda leaf: is_input(leaf) or is_number(leaf)
    arrays = tuple(i for i, x in enumerate(leaves) if i in perturbed or is_given(x))
    for i in arrays:
        leaves[i] = _as_input(leaves[i])
    return Arguments(tuple(leaves), treedef, arrays, perturbed, name, who)


def call_checked(fn: Callable[..., Any], args: Sequence[Any], kwargs: Any, who: str) -> Any:
    """Call a function; that it does not take these arguments is said in a user's words."""
    try:
        return fn(*args, **kwargs)
    except _NEEDS_A_NUMBER as error:
        raise TypeError(
            f"{who}: `{name_of(fn)}` needs the value of something that is traced, for an `if`, a "
            "loop of Python or a shape. Arrays among the arguments are traced as under jax.jit, "
            "and for a plan numbers and bools too. Bind what must stay a number with "
            "functools.partial(fn, n=...) or a lambda, and use that in the place of fn from here "
            f"on. JAX says: {str(error).partition(chr(10))[0]}"
        ) from error
    except TypeError as error:
        wrong = _unbound(fn, args, kwargs)
        if not wrong:
            raise
        raise TypeError(
            f"{who}: `{name_of(fn)}` does not take the arguments that it is given: {wrong}. "
            "They are given by position; bind others with functools.partial(fn, key=...), and "
            "use that in the place of fn from here on."
        ) from error


def is_input(leaf: Any) -> bool:
    """Whether this is an array of numbers or a shape, and no Python scalar."""
    return is_traced(leaf) or (isinstance(leaf, np.ndarray) and is_number(leaf))


def _unbound(fn: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> str | None:
    """Why a function cannot be called so, in Python's words; if it cannot, and that is known."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return None


def _checked(
    fn: Any, args: tuple[Any, ...], argnums: int | Sequence[int], who: str
) -> tuple[int, ...]:
    if not callable(fn):
        raise TypeError(
            f"{who}: the first argument is a function; got {type(fn).__name__}. Pass the loss "
            "function itself, and its arguments behind it."
        )
    chosen = tuple(argnums) if isinstance(argnums, Sequence) else (argnums,)
    way_out = "Positions count from 0." if args else "Pass them behind the function."
    for n in chosen:
        if isinstance(n, bool) or not hasattr(n, "__index__"):
            raise TypeError(
                f"{who}: argnums is a position or a tuple of them; got {argnums!r}. Write "
                "argnums=0 or argnums=(0, 1)."
            )
        if not -len(args) <= n < len(args):
            raise ValueError(
                f"{who}: argnums names one of the {len(args)} arguments that `{name_of(fn)}` is "
                f"given; got {argnums!r}. {way_out}"
            )
    chosen = tuple(int(n) % len(args) for n in chosen)
    if len(set(chosen)) < len(chosen):
        raise ValueError(
            f"{who}: argnums names each argument once; got {argnums!r}. Leave out what is there "
            "twice."
        )
    if not any(_can_move(leaf) for n in chosen for leaf in jax.tree.leaves(args[n])):
        raise ValueError(
            f"{who}: a gradient needs a floating array; arguments {chosen} of `{name_of(fn)}` "
            "hold none. Say with argnums which argument is differentiated."
        )
    return chosen


def _result(out: Any, has_aux: bool, who: str, fn: str) -> tuple[Any, list[Any]]:
    if has_aux and not (isinstance(out, tuple | list) and len(out) == 2):
        raise TypeError(
            f"{who}: with has_aux=True `{fn}` returns a pair (loss, aux); got {_described(out)}. "
            "If it returns the loss alone, leave has_aux out."
        )
    value, more = out if has_aux else (out, None)
    if _is_loss(value):
        return jnp.asarray(value), jax.tree.leaves(more)
    raise TypeError(
        f"{who}: `{fn}` returns one floating number, a loss; got {_described(value)}. "
        f"{_way_out(value, has_aux)}"
    )


def _way_out(value: Any, has_aux: bool) -> str:
    if not is_number(value) and not has_aux:
        return "Return the loss alone; if it returns (loss, aux), pass has_aux=True."
    if is_number(value) and jnp.issubdtype(jnp.result_type(value), jnp.complexfloating):
        return "Take the real part of what it returns, or its absolute value."
    return "Sum or average what it returns."


def _is_loss(value: Any) -> bool:
    if not is_number(value) or jnp.shape(value) != ():
        return False
    return jnp.issubdtype(jnp.result_type(value), jnp.floating)


def _described(value: Any) -> str:
    if not is_number(value):
        return type(value).__name__
    return f"{jnp.result_type(value)}{list(jnp.shape(value))}"


def _can_move(leaf: Any) -> bool:
    if isinstance(leaf, float | complex):
        return True
    return (is_input(leaf) or isinstance(leaf, np.generic)) and is_floating(leaf)


def _as_input(leaf: Any) -> Any:
    """What stands for a leaf in the program; of NumPy's arrays and of numbers only the type."""
    if is_traced(leaf):
        return leaf
    weak = not isinstance(leaf, np.ndarray | np.generic)
    dtype = jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype)
    return jax.ShapeDtypeStruct(np.shape(leaf), dtype, weak_type=weak)
