"""`lax.scan` whose backward pass holds few carries and re-runs the steps between them."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrc._errors import listed
from jrc._jaxpr import evaluate, trace
from jrc._tree import named_leaves
from jrc._validate import check_flag
from jrc.remat._scan.backward import scan_with_saved_carries
from jrc.remat._scan.loop import Loop
from jrc.remat._scan.schedule import levels_of, segment_counts


def recompute_scan(
    body: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any,
    *,
    segments: str | int | Sequence[int] = "sqrt",
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[Any, Any]:
    """`jax.lax.scan` whose backward pass holds few carries and no other intermediates.

    The loop of N steps is cut into segments; the carry before each is saved. The backward pass
    takes them last first: it runs a segment again to learn the carries inside, and then each step
    once more for its derivative. Apart from carries only one step's intermediates are alive. With
    S segments a gradient runs the body 3 N - S times instead of N, and holds S + N / S carries.
    With more levels (segments inside segments) it holds the sum of what the levels hold, and a
    level of c segments adds N (c - 1) / c runs; the program grows with the number of levels only.

    A number of segments that does not divide leaves fewer steps than segments over. They run
    first, and last in the backward pass, as a segment of their own; nothing is padded.

    What works: any pytrees, integers, typed keys, `vmap`, `jit`, `shard_map`, gradients of
    gradients (`jax.hessian` too, whose memory nothing bounds). Forward mode of the call itself
    (`jax.jvp`, `jax.jacfwd`) does not, because it is built on `jax.custom_vjp`.

    Each step is re-run whole: `jrc.keep_op` inside the body has no effect.

    Args:
        body: `(carry, x) -> (carry, y)`, as for `jax.lax.scan`. What it closes over gets
            gradients too.
        carry: The first carry, a pytree of arrays of any shapes and dtypes.
        xs: A pytree of arrays of shape `(N, ...)`, or `None` with a `length`.
        segments: `"sqrt"`: about the root of N segments, as leaves the fewest steps over.
            `"log"`: levels of four segments each (three or five where that leaves fewer over):
            about 4 log4 N carries are held, and the body runs N (2 + 0.75 (log4 N - 1)) times.
            A number of segments, or a tuple with one number for each level: `(8, 4)` is 8
            segments of 4 segments each. `1` saves the first carry only.
        length: Number of steps N; needed without `xs`, else it must agree with them.
        reverse: Whether to go from the last `x` to the first.
        unroll: Steps written out per round of an innermost loop, as for `jax.lax.scan`.

    Returns:
        The last carry, and the stacked `y`s of shape `(N, ...)`, as `jax.lax.scan` gives them.

    Raises:
        TypeError: If `body` is not callable, `segments` is no text or whole number, `length` is no
            whole number, `reverse` or `unroll` is of another kind, or an `x` has no leading axis;
            whatever `jax.lax.scan` raises when the carry changes its type.
        ValueError: If `segments` is an unknown text, below 1 or above N, `unroll` is negative, or
            if the leading axes and `length` differ or say nothing.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def body(w, h, x):
        ...     h = jnp.tanh(h @ w + x)
        ...     return h, jnp.sum(h)
        >>> def loss(w, xs, segments):
        ...     h, ys = jrc.recompute_scan(
        ...         lambda h, x: body(w, h, x), jnp.zeros(3), xs, segments=segments)
        ...     return jnp.sum(h) + jnp.sum(ys)
        >>> jax.grad(loss)(jnp.ones((3, 3)), jnp.ones((100, 3)), "log").shape
        (3, 3)

    Source: Griewank and Walther, "Algorithm 799: revolve", ACM TOMS 26 (2000); Chen et al., arXiv
    1604.06174, section 4; https://github.com/jax-ml/jax/issues/2139.
    """
    if not callable(body):
        raise TypeError(
            "jrc.recompute_scan: the first argument is the function to loop over; got "
            f"{type(body).__name__}. Write jrc.recompute_scan(body, carry, xs)."
        )
    check_flag(reverse, "reverse", "jrc.recompute_scan")
    _check_unroll(unroll)
    steps = _length(xs, length)
    counts = segment_counts(segments, steps)
    options = {"length": steps, "reverse": reverse, "unroll": unroll}
    if steps == 0:
        return jax.lax.scan(body, carry, xs, **options)
    run, constants, shapes = _trace_body(body, carry, xs, options)
    rows = [_as_type(x, None) for x in jax.tree.leaves(xs)]
    # A Python number takes the type that the body gives it, as in `lax.scan`.
    first = [
        _as_type(*both) for both in zip(*map(jax.tree.leaves, (carry, shapes[0])), strict=True)
    ]
    loop = Loop(_step(run, len(first)), steps, reverse, unroll)
    last, ys = scan_with_saved_carries(loop, levels_of(steps, counts))(constants, first, rows)
    trees = [jax.tree.structure(x) for x in shapes]
    return trees[0].unflatten(last), trees[1].unflatten(ys)


def _length(xs: Any, length: int | None) -> int:
    """The number of steps on which all say the same."""
    shapes = {name or "xs": np.shape(leaf) for name, leaf in named_leaves(xs)}
    if scalars := [name for name, shape in shapes.items() if not shape]:
        raise TypeError(
            "jrc.recompute_scan: the leaves of xs have a leading axis, one entry for each step; "
            f"got no axis at {listed(scalars)}. Close over what is the same in every step."
        )
    given = [] if length is None else [_whole(length)]
    match list({shape[0] for shape in shapes.values()}.union(given)):
        case [n] if n >= 0:
            return n
    said = [f"{name!r}: {shape[0]}" for name, shape in shapes.items()]
    raise ValueError(
        "jrc.recompute_scan: the leading axes of xs and length are one number of steps; got "
        f"{', '.join(said) or 'no xs'} and length={length}. With xs=None pass length=N."
    )


def _whole(length: Any) -> int:
    if isinstance(length, bool) or not hasattr(length, "__index__"):
        raise TypeError(
            "jrc.recompute_scan: length is a whole number of steps, known when the loop is traced; "
            f"got {length!r}. Write length=4."
        )
    return operator.index(length)


def _check_unroll(unroll: Any) -> None:
    rule = "jrc.recompute_scan: unroll is a number of steps, or True for all of them"
    if not isinstance(unroll, int):
        raise TypeError(f"{rule}; got {unroll!r}. Write unroll=4.")
    if unroll < 0:
        raise ValueError(f"{rule}; got {unroll}. unroll=1 writes out one step.")


def _trace_body(
    body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any, options: dict[str, Any]
) -> tuple[Callable[..., Sequence[Any]], list[Any], Any]:
    """The body as a program on arrays, what it closes over, and the shapes of the loop's results.

    `lax.scan` itself calls the body, so that types are settled and errors worded as there.
    """
    found: list[Any] = []

    @functools.wraps(body)
    def probe(*args: Any) -> Any:
        arrays = lambda *args: jax.tree.map(jnp.asarray, body(*args))  # noqa: E731
        traced, leaves = trace(arrays, args, {}), jax.tree.leaves(args)
        constants = traced.inputs[: len(traced.inputs) - len(leaves)]
        found[:] = [evaluate(traced.program.jaxpr), list(constants)]
        return traced.run(found[0])

    # Unrolled into Python, the loop would be traced step by step.
    with jax.disable_jit(False):
        shapes = jax.eval_shape(lambda: jax.lax.scan(probe, carry, xs, **options))
    return *found, shapes


def _step(
    run: Callable[..., Sequence[Any]], carries: int
) -> Callable[..., tuple[list[Any], list[Any]]]:
    """The body on lists: `(constants, carry, x) -> (carry, y)`."""

    def step(*groups: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        out = [jnp.asarray(x) for x in run(*(x for group in groups for x in group))]
        return out[:carries], out[carries:]

    return step


def _as_type(leaf: Any, shape: Any) -> Any:
    """The array itself where nothing changes, so that what is saved is the argument."""
    if isinstance(leaf, jax.Array) and (shape is None or leaf.dtype == shape.dtype):
        return leaf
    return jnp.asarray(leaf, None if shape is None or shape.weak_type else shape.dtype)
