"""`jrc.recompute_sequential`: a chain of functions, cut into segments that are recomputed."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jrc._errors import public, speaking_as
from jrc._validate import check_flag, whole_number
from jrc.remat._segments.recompute_call import recompute


@public("jrc.recompute_sequential")
def recompute_sequential(
    functions: Iterable[Callable[..., Any]],
    *args: Any,
    segments: int,
    preserve_rng_state: bool = True,
) -> Any:
    """Call functions one after another; of each segment of them only the input is saved.

    The chain is cut into segments of `len(functions) // segments` functions; the last one takes the
    remainder. Each segment is one `jrc.recompute`, except the last: the backward pass begins with
    it, so that it is not recomputed.

    Args:
        functions: The functions, at least one, in the order of their calls. Each is called with
            the result of the one before, as ONE argument, a tuple too: as in both sources below.
        *args: The arguments of the first function: one or many, any pytrees, any batch size.
        segments: Number of segments, from 1 (nothing is recomputed) to `len(functions)`.
        preserve_rng_state: As for `jrc.recompute`, for each segment that is recomputed. `False`
            needs a typed key in the input of each of them.

    Returns:
        The result of the last function.

    Raises:
        TypeError: If `functions` is no sequence of callables, `segments` no whole number, or
            `preserve_rng_state` neither `True` nor `False`.
        ValueError: If there is no function, or `segments` is below 1 or above their number.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def loss(w, x):
        ...     layers = [lambda x: jnp.sin(x @ w)] * 4
        ...     return jnp.sum(jrc.recompute_sequential(layers, x, segments=2))
        >>> jax.grad(loss)(jnp.ones((3, 3)), jnp.ones((2, 3))).shape
        (3, 3)

    Source: Paddle `distributed/fleet/recompute/recompute.py`, `recompute_sequential`; PyTorch
    `torch/utils/checkpoint.py`, `checkpoint_sequential`; Chen et al., arXiv 1604.06174.
    """
    chain = _checked(functions)
    check_flag(preserve_rng_state, "preserve_rng_state")
    segments = whole_number(
        segments, "segments", least=1, most=len(chain),
        remedy=f"segments={len(chain)} makes each function a segment.",
    )  # fmt: skip
    size = len(chain) // segments
    for k in range(segments - 1):
        segment = chain[k * size : (k + 1) * size]
        with speaking_as("jrc.recompute_sequential", "jrc.recompute"):
            args = (recompute(_composed(segment), *args, preserve_rng_state=preserve_rng_state),)
    return _composed(chain[(segments - 1) * size :])(*args)


def _composed(segment: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """The functions of a segment as one."""

    def call(*args: Any) -> Any:
        result = segment[0](*args)
        for function in segment[1:]:
            result = function(result)
        return result

    return call


def _checked(functions: Any) -> list[Callable[..., Any]]:
    """The functions as a list, each of them callable."""
    rule = "functions must be a list of functions"
    if not isinstance(functions, Iterable):
        raise TypeError(f"{rule}, got {type(functions).__name__}. Write [first, second].")
    chain = list(functions)
    if not chain:
        raise ValueError(f"{rule}, at least one, got none. Return the arguments themselves.")
    for i, function in enumerate(chain):
        if not callable(function):
            raise TypeError(
                f"{rule}, got {type(function).__name__} at place {i}. Wrap it in a function."
            )
    return chain
