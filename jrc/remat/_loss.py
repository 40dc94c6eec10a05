"""A scalar function whose gradient is looked at: what moves and what does not, as flat lists.

>>> import jax.numpy as jnp
>>> loss = loss_of(lambda w, n: jnp.sum(w["a"]) * n, ({"a": jnp.ones(3)}, 2), 0, False, "here")
>>> loss.moving, len(loss.rest), loss.value(loss.moving, loss.rest)[0].shape
([Array([1., 1., 1.], dtype=float32)], 0, ())
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrc._errors import name_of
from jrc._jaxpr import INPUT, Program, evaluate, inner_programs
from jrc._jaxpr import trace as trace_program
from jrc._tree import is_array, is_floating, is_traced

_MARK_SCOPE = "jrc_mark_"


@dataclasses.dataclass(frozen=True, eq=False)
class Loss:
    """A traced scalar function of two lists of arrays.

    Attributes:
        program: The function as a program, whose inputs are constants, `moving` and `rest`.
        constants: What the function closes over.
        moving: What it is differentiated with respect to; arrays or shapes.
        rest: Its other arrays.
        name: What the user calls it.
    """

    program: Program
    constants: tuple[Any, ...]
    moving: list[Any]
    rest: list[Any]
    name: str

    def value(self, moving: Sequence[Any], rest: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The scalar, and whatever else the function returns."""
        return self._split(evaluate(self.program.jaxpr), moving, rest)

    def marked_value(self, moving: Sequence[Any], rest: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The same; what makes a marked value runs under a name scope that says so."""
        return self._split(self._under_marks, moving, rest)

    def pullback(self, moving: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
        """What the derivative keeps."""
        _, pull, _ = jax.vjp(lambda *xs: self.value(xs, rest), *moving, has_aux=True)
        return jax.tree.leaves(pull)

    def gradient(self, moving: Sequence[Any], rest: Sequence[Any]) -> Any:
        """Value and gradients."""
        return jax.value_and_grad(self.value, has_aux=True)(list(moving), rest)

    def compiled(self) -> Any:
        """The compiled program of value and gradients."""

        def gradient(moving: Sequence[Any], rest: Sequence[Any]) -> Any:
            return jax.value_and_grad(self.marked_value, has_aux=True)(list(moving), rest)

        return jax.jit(gradient).lower(self.moving, self.rest).compile()

    def _split(
        self, run: Callable[..., Any], moving: Sequence[Any], rest: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        value, *more = run(*self.constants, *moving, *rest)
        return value, more

    def marks_in(self, path: str) -> list[tuple[str, bool]]:
        """The marks of what an operator of the compiled program makes, from its path.

        With each, whether it is made by many operators (a region, a call), of which the last
        makes the value.
        """
        found = (int(p) for p in re.findall(rf"{_MARK_SCOPE}(\d+)_", path))
        return [(self._marks[p], bool(inner_programs(self.program.eqns[p]))) for p in found]

    @cached_property
    def _marks(self) -> Mapping[int, str]:
        """The mark of each equation that makes a marked value, by the equation's position."""
        names = self.program.names.items()
        found = {self.program.producer[var]: name for var, name in names}
        return {p: name for p, name in found.items() if p != INPUT and self._live[p]}

    @cached_property
    def _live(self) -> tuple[bool, ...]:
        return self.program.live()

    def _under_marks(self, *inputs: Any) -> list[Any]:
        program = self.program
        values = dict(zip(program.jaxpr.invars, inputs, strict=True))
        start = 0
        for end in [*sorted(self._marks), len(program.eqns)]:
            # What nothing depends on is left out: the rest does not hand values on to it.
            live = [p for p in range(start, end) if self._live[p]]
            self._run(live, nullcontext(), values)
            if end in self._marks:
                # A number, because a mark may hold what parts the names of scopes.
                self._run([end], jax.named_scope(f"{_MARK_SCOPE}{end}_"), values)
            start = end + 1
        return program.results(values)

    def _run(
        self, positions: Sequence[int], scope: AbstractContextManager[Any], values: dict[Any, Any]
    ) -> None:
        part = self.program.cut(positions)
        with scope:
            results = evaluate(part)(*(values[var] for var in part.invars))
        values |= dict(zip(part.outvars, results, strict=True))


def loss_of(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    argnums: int | Sequence[int],
    has_aux: bool,
    who: str,
) -> Loss:
    """Trace a function; errors speak for `who`. Nothing is run.

    Of the arguments `argnums` every floating leaf moves. JAX arrays, shapes and NumPy's arrays are
    inputs of the program; all else stays what it is.
    """
    chosen = _checked(fn, args, argnums, who)
    name = name_of(inspect.unwrap(fn))
    leaves, treedef = jax.tree.flatten(args)
    paths, _ = jax.tree_util.tree_flatten_with_path(args)
    moves = [path[0].idx in chosen and _can_move(leaf) for path, leaf in paths]
    given = [m or _is_input(x) for m, x in zip(moves, leaves, strict=True)]
    order = sorted((i for i, is_given in enumerate(given) if is_given), key=lambda i: not moves[i])
    inputs = [_as_input(leaves[i]) for i in order]

    def flat(*arrays: Any) -> list[Any]:
        filled = list(leaves)
        for i, x in zip(order, arrays, strict=True):
            filled[i] = x
        out = fn(*treedef.unflatten(filled))
        value, more = _result(out, has_aux, who, name)
        return [value, *more]

    traced = trace_program(flat, tuple(inputs), {})
    constants = traced.inputs[: len(traced.inputs) - len(inputs)]
    count = sum(moves)
    return Loss(traced.program, constants, inputs[:count], inputs[count:], name)


def _checked(
    fn: Any, args: tuple[Any, ...], argnums: int | Sequence[int], who: str
) -> tuple[int, ...]:
    if not callable(fn):
        raise TypeError(f"{who}: the first argument is a function; got {type(fn).__name__}.")
    chosen = tuple(argnums) if isinstance(argnums, Sequence) else (argnums,)
    for n in chosen:
        if isinstance(n, bool) or not hasattr(n, "__index__"):
            raise TypeError(f"{who}: argnums is a position or a tuple of them; got {argnums!r}.")
        if not -len(args) <= n < len(args):
            raise ValueError(
                f"{who}: argnums names one of the {len(args)} arguments that `{name_of(fn)}` is "
                f"given; got {argnums!r}. Positions count from 0."
            )
    chosen = tuple(int(n) % len(args) for n in chosen)
    if not any(_can_move(leaf) for n in chosen for leaf in jax.tree.leaves(args[n])):
        raise ValueError(
            f"{who}: a gradient needs a floating array; arguments {chosen} of `{name_of(fn)}` "
            "hold none. Say with argnums which argument is differentiated."
        )
    return chosen


def _result(out: Any, has_aux: bool, who: str, fn: str) -> tuple[Any, list[Any]]:
    if has_aux and not (isinstance(out, tuple | list) and len(out) == 2):
        raise TypeError(
            f"{who}: with has_aux=True `{fn}` returns a pair (loss, aux); got {type(out).__name__}."
        )
    value, more = out if has_aux else (out, None)
    if _is_loss(value):
        return jnp.asarray(value), jax.tree.leaves(more)
    hint = " If it returns (loss, aux), pass has_aux=True." if isinstance(out, tuple) else ""
    raise TypeError(
        f"{who}: `{fn}` returns one floating number, a loss; got {_described(value)}.{hint} "
        "Sum or average what it returns."
    )


def _is_loss(value: Any) -> bool:
    if not _is_value(value) or jnp.shape(value) != ():
        return False
    return jnp.issubdtype(jnp.result_type(value), jnp.inexact)


def _described(value: Any) -> str:
    if not _is_value(value):
        return type(value).__name__
    return f"{jnp.result_type(value)}{list(jnp.shape(value))}"


def _is_value(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, bool | int | float | complex)


def _is_input(leaf: Any) -> bool:
    numeric = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufcV"
    return is_traced(leaf) or numeric


def _can_move(leaf: Any) -> bool:
    if isinstance(leaf, float | complex):
        return True
    return (_is_input(leaf) or isinstance(leaf, np.generic)) and is_floating(leaf)


def _as_input(leaf: Any) -> Any:
    """What stands for a leaf in the program; of NumPy's arrays and of numbers only the type."""
    if is_traced(leaf):
        return leaf
    weak = not isinstance(leaf, np.ndarray | np.generic)
    dtype = jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype)
    return jax.ShapeDtypeStruct(np.shape(leaf), dtype, weak_type=weak)
