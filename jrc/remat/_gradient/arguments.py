"""Split the arguments of a loss function into leaves, and trace its gradient.

>>> import jax.numpy as jnp
>>> args = {"w": jnp.ones(3), "step": 4}, "train"
>>> loss = lambda tree, mode: jnp.sum(tree["w"]) * tree["step"]
>>> arguments = arguments_of(loss, args, 0, numbers=True)
>>> arguments.perturbed, arguments.arrays, arguments.inputs, arguments.filled(["the weights"])
((1,), (0, 1), (1,), ({'step': 4, 'w': 'the weights'}, 'train'))
"""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jrc._errors import name_of, named_like, running_name
from jrc._tree import aval_of, is_floating, is_number, is_traced
from jrc._validate import is_whole
from jrc.remat._gradient.compiled_memory import (
    device_of,
)
from jrc.remat._gradient.loss_of_result import loss_of_result
from jrc.remat._gradient.numbers import settled

# What JAX raises where Python needs the value of a tracer.
_NEEDS_A_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.TracerArrayConversionError,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Arguments:
    """The leaves of a function's arguments.

    Attributes:
        leaves: All leaves; inputs are JAX arrays or `jax.ShapeDtypeStruct`s.
        treedef: The tree of the arguments.
        arrays: Indices of the leaves that are inputs of the function's program.
        inputs: Indices of those that are inputs of what is compiled: numbers of Python in an
            argument that JAX's transforms do not take are constants in it, as under
            `equinox.filter_jit`.
        perturbed: Indices of those that are differentiated, in the order of `argnums`.
        argnums: The arguments that are differentiated, by position.
        are_plain: Whether `jax.jit` and `jax.value_and_grad` take the arguments as they are: all
            leaves are arrays, all of the differentiated ones floating.
        name: The function's name.
        is_wrapped: Whether it is a transform of another one, as those of JAX are.
    """

    leaves: tuple[Any, ...]
    treedef: Any
    arrays: tuple[int, ...]
    inputs: tuple[int, ...]
    perturbed: tuple[int, ...]
    argnums: int | tuple[int, ...]
    are_plain: bool
    name: str
    is_wrapped: bool

    def of(self, indices: Sequence[int]) -> list[Any]:
        """Return the leaves with these indices."""
        return [self.leaves[i] for i in indices]

    def filled(self, values: Sequence[Any], indices: Sequence[int] | None = None) -> Any:
        """Return the arguments with new values for the leaves with these indices.

        Args:
            values: One value for each index.
            indices: Indices of leaves; by default those of all inputs.
        """
        new = list(self.leaves)
        for i, x in zip(self.inputs if indices is None else indices, values, strict=True):
            new[i] = x
        return self.treedef.unflatten(new)

    def result(self, out: Any, has_aux: bool) -> tuple[Any, list[Any]]:
        """Return the loss and the leaves of the auxiliary result, after checking both."""
        return loss_of_result(out, has_aux, self.name, self._differentiated, self.is_wrapped)

    def _differentiated(self) -> Any:
        """Return the arguments that are differentiated, as `argnums` names them."""
        tree, chosen = self.filled(self.of(self.inputs)), self.argnums
        return tree[chosen] if isinstance(chosen, int) else tuple(tree[n] for n in chosen)

    def gradient(self, fn: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
        """Return the value and gradients of a function, as a function of all inputs.

        The gradients are those with respect to the perturbed leaves.
        """

        def run(*inputs: Any) -> Any:
            values = dict(zip(self.inputs, inputs, strict=True))

            def loss(perturbed: Sequence[Any]) -> tuple[Any, list[Any]]:
                new = values | dict(zip(self.perturbed, perturbed, strict=True))
                out = call_checked(fn, self.filled(list(new.values()), list(new)), {})
                value, more = self.result(out, has_aux)
                return value, [x for x in more if is_number(x)]

            return jax.value_and_grad(loss, has_aux=True)([values[i] for i in self.perturbed])

        return run

    def concrete(self) -> list[Any]:
        """Return arguments for what `staged` compiles."""
        inputs = self.of(self.inputs)
        return list(self.filled(inputs)) if self.are_plain else inputs

    @property
    def platform(self) -> str:
        """The platform that the program is compiled for: `"cpu"`, `"gpu"`, `"tpu"`."""
        return device_of(self.of(self.inputs)).platform

    def lowered(self, fn: Callable[..., Any], has_aux: bool) -> jax.stages.Lowered:
        """Lower value and gradients for compilation, as `staged` has them."""
        return self.staged(fn, has_aux).lower()

    def staged(self, fn: Callable[..., Any], has_aux: bool) -> jax.stages.Traced:
        """Trace value and gradients for compilation; the result has the program, and is lowered.

        Where it can be, the program is that of `jax.jit(jax.value_and_grad(fn, argnums, has_aux))`
        to the letter, so that JAX's persistent cache of compiled programs has it for the user's own
        call.
        """
        try:
            if self.are_plain:
                return self._staged_by_value_and_grad(fn, has_aux)
        except _NotAnArrayError:
            pass
        return jax.jit(self.gradient(fn, has_aux)).trace(*self.of(self.inputs))

    def _staged_by_value_and_grad(self, fn: Callable[..., Any], has_aux: bool) -> jax.stages.Traced:
        @named_like(fn)
        def loss(*args: Any) -> Any:
            out = call_checked(fn, args, {})
            self.result(out, has_aux)
            if not all(map(is_number, jax.tree.leaves(out))):
                raise _NotAnArrayError
            return out

        gradient = jax.value_and_grad(loss, self.argnums, has_aux)
        return jax.jit(gradient).trace(*self.filled(self.of(self.inputs)))


class _NotAnArrayError(Exception):
    """A function returned, beside its loss, what is no array: `jax.jit` does not take it."""


def arguments_of(
    fn: Any,
    args: tuple[Any, ...],
    argnums: int | Sequence[int],
    *,
    numbers: bool = False,
) -> Arguments:
    """Split a function's arguments into leaves, after checking them.

    JAX arrays, shapes and NumPy arrays are inputs of the program, and so are floats in what is
    differentiated; other leaves are passed to the function as they are. Numbers whose values the
    function needs are passed too, whatever else is said of them; see `settled`.

    A float is not differentiated in an argument with functions, flags or text among its leaves,
    which `jax.grad` does not take: such a module is for `equinox.filter_grad`, for which a float
    is no parameter. It is where nothing else is differentiated.

    Args:
        fn: The function.
        args: Its positional arguments.
        argnums: The arguments that are differentiated: every floating leaf of them.
        numbers: Whether Python numbers are inputs of the program too.

    Raises:
        TypeError: If `fn` is no function, or `argnums` is no position.
        ValueError: If there is no such argument, or it has no floating leaf.
    """
    chosen = _checked(fn, args, argnums)

    def traceable(path: Sequence[Any], leaf: Any) -> bool:
        return numbers or (path[0].idx in chosen and _is_differentiable(leaf))

    given = jax.tree.leaves(args)
    args, _ = settled(fn, args, {}, traceable)
    paths, treedef = jax.tree_util.tree_flatten_with_path(args)
    leaves = [leaf for _, leaf in paths]
    floating = [(chosen.index(path[0].idx), i) for i, (path, leaf) in enumerate(paths)
                if path[0].idx in chosen and is_input(leaf) and is_floating(leaf)]  # fmt: skip
    perturbed = tuple(i for _, i in sorted(floating))
    name = name_of(inspect.unwrap(fn))
    if not perturbed:
        raise ValueError(
            f"argnums must name an argument with a floating array, got {argnums!r}, and "
            f"arguments {chosen} of `{name_of(fn)}` have none. Pass argnums=, the positions to "
            "differentiate."
        )
    inputs = arrays = tuple(i for i, x in enumerate(leaves) if is_input(x))
    differentiated = [path for path, _ in paths if path[0].idx in chosen]
    are_plain = len(arrays) == len(leaves) and len(differentiated) == len(perturbed)
    refused = {
        path[0].idx
        for (path, _), leaf in zip(paths, leaves, strict=True)
        if not is_input(leaf) or (path[0].idx in chosen and not is_floating(leaf))
    }
    constant = {i for i in arrays if not is_input(given[i]) and paths[i][0][0].idx in refused}
    if constant and not constant.issuperset(perturbed):
        inputs = tuple(i for i in arrays if i not in constant)
        perturbed = tuple(i for i in perturbed if i in inputs)
        leaves = [x if i in inputs else given[i] for i, x in enumerate(leaves)]
    for i in inputs:
        leaves[i] = leaves[i] if is_traced(leaves[i]) else aval_of(leaves[i])
    return Arguments(
        leaves=tuple(leaves),
        treedef=treedef,
        arrays=arrays,
        inputs=inputs,
        perturbed=perturbed,
        argnums=chosen if isinstance(argnums, Sequence) else chosen[0],
        are_plain=are_plain,
        name=name,
        is_wrapped=inspect.unwrap(fn) is not fn,
    )


def call_checked(fn: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
    """Call a function; raise in the user's words if it does not accept these arguments.

    Raises:
        TypeError: If the arguments do not fit its signature, or it needs the value of a tracer.
    """
    try:
        return fn(*args, **kwargs)
    except _NEEDS_A_VALUE as error:
        raise TypeError(
            f"`{name_of(fn)}` must not need the value of a traced argument, got a use of "
            "one in an `if`, a Python loop or a shape. Arrays among the arguments are traced as "
            "under jax.jit. Pass a number of Python instead, or bind it with "
            "functools.partial(fn, n=...), and use that instead of fn from here on. "
            f"JAX reports: {str(error).partition(chr(10))[0]}"
        ) from error
    except TypeError as error:
        mismatch = _signature_mismatch(fn, args, kwargs)
        if not mismatch:
            raise
        raise TypeError(
            f"`{name_of(fn)}` must accept the arguments by position, got the error: "
            f"{mismatch}. Bind others with functools.partial(fn, key=...), and use that instead "
            "of fn from here on."
        ) from error


def refuse_tracers(values: Any, closed_by: str = "") -> None:
    """Raise if a value is traced: a gradient is looked at as a whole, outside of `jax.jit`.

    Args:
        values: A pytree.
        closed_by: The name of the function that closes over the values; else they are arguments.

    Raises:
        TypeError: If a leaf is a tracer.
    """
    what = f"what `{closed_by}` closes over" if closed_by else "arguments"
    for leaf in jax.tree.leaves(values):
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError(
                f"{what} must be arrays or shapes, got a traced {leaf.dtype}{list(leaf.shape)}. "
                f"Call {running_name()} outside of jax.jit and other transforms, with "
                "jax.ShapeDtypeStruct(...) as an argument in the place of each traced array; a "
                "plan is used inside of them, as plan.apply(fn)."
            )


def is_input(leaf: Any) -> bool:
    """Return whether a leaf is an array of numbers or a shape, and no Python scalar."""
    return is_traced(leaf) or (isinstance(leaf, np.ndarray) and is_number(leaf))


def _signature_mismatch(fn: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> str | None:
    """Return Python's error if these arguments do not fit a function's known signature."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return None


def _checked(fn: Any, args: tuple[Any, ...], argnums: int | Sequence[int]) -> tuple[int, ...]:
    """Return `argnums` as a tuple of positions from 0, after checking the call."""
    if not callable(fn):
        raise TypeError(
            f"fn must be a function, got {type(fn).__name__}. Pass the loss function "
            "itself, followed by its arguments."
        )
    chosen = tuple(argnums) if isinstance(argnums, Sequence) else (argnums,)
    way_out = "Positions count from 0." if args else "Pass its arguments after the function."
    for n in chosen:
        if not is_whole(n):
            raise TypeError(
                f"argnums must be a position or a tuple of them, got {argnums!r}. Write "
                "argnums=0 or argnums=(0, 1)."
            )
        if not -len(args) <= n < len(args):
            raise ValueError(
                f"argnums must be positions of the {len(args)} arguments given to "
                f"`{name_of(fn)}`, got {argnums!r}. {way_out}"
            )
    chosen = tuple(int(n) % len(args) for n in chosen)
    if len(set(chosen)) < len(chosen):
        raise ValueError(
            f"argnums must name each argument once, got {argnums!r}. Leave out the repeated one."
        )
    return chosen


def _is_differentiable(number: Any) -> bool:
    """Return whether a number of Python or NumPy is floating."""
    return isinstance(number, float | complex) or (
        isinstance(number, np.generic) and is_floating(number)
    )
