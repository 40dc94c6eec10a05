"""`jrc.recompute_scan`: `lax.scan` that saves few carries and recomputes the steps between."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np

from jrc._errors import listed, public
from jrc._jaxpr import Program, evaluate, label, trace
from jrc._tree import named_leaves
from jrc._validate import check_flag, whole_number
from jrc.remat._region.effects import must_run_once
from jrc.remat._scan.backward import scan_with_saved_carries
from jrc.remat._scan.loop import Loop
from jrc.remat._scan.schedule import levels_of, segment_counts


@public("jrc.recompute_scan")
def recompute_scan(
    body: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any,
    *,
    segments: str | SupportsIndex | Sequence[SupportsIndex] = "sqrt",
    length: SupportsIndex | None = None,
    reverse: bool = False,
    unroll: SupportsIndex = 1,
) -> tuple[Any, Any]:
    """Run `jax.lax.scan` so that its gradient saves few carries and no other intermediates.

    The loop of N steps is cut into segments, and the carry before each segment is saved. The
    backward pass takes the last segment first: it recomputes the carries inside the segment, and
    then each step once more for its derivative. Besides carries, only the intermediates of one step
    are live. With S segments a gradient runs the body 3 N - S times instead of N, and stores
    S + N / S carries. With more levels (segments inside segments) it stores the sum of the levels'
    carries, and a level of c segments adds N (c - 1) / c runs of the body. The size of the program
    grows with the number of levels only.

    If the number of segments does not divide N, the remaining steps are a segment of their own,
    the first one; nothing is padded.

    Supported: any pytrees, integers, typed keys, `vmap`, `jit`, `shard_map`, and gradients of
    gradients (`jax.hessian` too, with unbounded memory). Not supported: forward mode of the call
    itself (`jax.jvp`, `jax.jacfwd`), because it is built on `jax.custom_vjp`.

    The body must have no effect that counts its runs, such as a write to a `jax.Ref` or an
    `io_callback`: its steps run up to three times. `jax.debug.print` prints as often.

    Python calls `body` once; JAX traces its program several times. Each step is recomputed whole:
    `jrc.keep_op` inside the body has no effect.

    Args:
        body: `(carry, x) -> (carry, y)`, as for `jax.lax.scan`. Arrays that it closes over have
            gradients too.
        carry: The first carry, a pytree of arrays of any shapes and dtypes.
        xs: A pytree of arrays of shape `(N, ...)`, or `None` with a `length`.
        segments: `"sqrt"`: about sqrt(N) segments, the number with the smallest remainder.
            `"log"`: levels of four segments each (three or five for a smaller remainder): about
            4 log4 N carries are stored, and the body runs N (2 + 0.75 (log4 N - 1)) times.
            A number of segments, or a tuple with one number for each level: `(8, 4)` is 8
            segments of 4 segments each. `1` saves the first carry only.
        length: The number of steps N; needed without `xs`, else it must agree with them.
        reverse: Whether the loop goes from the last `x` to the first.
        unroll: Steps per iteration of an innermost loop, as for `jax.lax.scan`.

    Returns:
        The last carry, and the stacked `y`s of shape `(N, ...)`, as `jax.lax.scan` gives them.

    Raises:
        TypeError: If `body` is not callable, `segments` is no text or whole number, `length` is no
            whole number, `reverse` is no bool, `unroll` is no whole number or bool, or a leaf of
            `xs` has no leading axis; as `jax.lax.scan` does, if the type of the carry changes.
        ValueError: If `segments` is an unknown text, below 1 or above N, `unroll` or `length` is
            negative, the leading axes and `length` differ, there are none of both, or `body` has
            an effect that must run once.

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
            f"body must be a function, got {type(body).__name__}. Write "
            "jrc.recompute_scan(body, carry, xs)."
        )
    check_flag(reverse, "reverse")
    unroll = _checked_unroll(unroll)
    steps = _length(xs, length)
    counts = segment_counts(segments, steps)
    options = {"length": steps, "reverse": reverse, "unroll": unroll}
    if steps == 0:
        return jax.lax.scan(body, carry, xs, **options)
    run, constants, shapes = _trace_body(body, carry, xs, options)
    rows = [_as_type(x, None) for x in jax.tree.leaves(xs)]
    # A Python number has the type that the body returns for it, as in `lax.scan`.
    first = [
        _as_type(*both) for both in zip(*map(jax.tree.leaves, (carry, shapes[0])), strict=True)
    ]
    loop = Loop(_step(run, len(first)), steps, reverse, unroll)
    last, ys = scan_with_saved_carries(loop, levels_of(steps, counts))(constants, first, rows)
    trees = [jax.tree.structure(x) for x in shapes]
    return trees[0].unflatten(last), trees[1].unflatten(ys)


def _length(xs: Any, length: SupportsIndex | None) -> int:
    """Return the number of steps, after checking that `xs` and `length` agree on it."""
    shapes = {name or "xs": np.shape(leaf) for name, leaf in named_leaves(xs)}
    if scalars := [name for name, shape in shapes.items() if not shape]:
        raise TypeError(
            "xs must have leaves with a leading axis, one entry for each step, "
            f"got no axis at {listed(scalars)}. Close over values that are equal in every step."
        )
    sizes = {shape[0] for shape in shapes.values()}
    if length is not None:
        remedy = "Write length=4, a number that is known when the loop is traced."
        sizes.add(whole_number(length, "length", least=0, remedy=remedy))
    match list(sizes):
        case [n]:
            return n
    found = [f"{name!r}: {shape[0]}" for name, shape in shapes.items()]
    raise ValueError(
        "xs and length must state one number of steps, got "
        f"{', '.join(found) or 'no xs'} and length={length}. With xs=None pass length=N."
    )


def _checked_unroll(unroll: Any) -> int | bool:
    """Return `unroll`, after checking that it is a whole number or a bool."""
    if isinstance(unroll, bool):
        return unroll
    remedy = "Write unroll=1 for one step, True for all of them."
    return whole_number(unroll, "unroll", least=0, remedy=remedy)


def _trace_body(
    body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any, options: dict[str, Any]
) -> tuple[Callable[..., Sequence[Any]], list[Any], Any]:
    """Return the body as a function of arrays, its closed-over arrays, and the result shapes.

    `lax.scan` calls the body, so that types and errors are its own.
    """
    found: list[Any] = []

    @functools.wraps(body)
    def probe(*args: Any) -> Any:
        arrays = lambda *args: jax.tree.map(jnp.asarray, body(*args))  # noqa: E731
        traced, leaves = trace(arrays, args, {}), jax.tree.leaves(args)
        constants = traced.inputs[: len(traced.inputs) - len(leaves)]
        _check_no_effects(traced.program)
        found[:] = [evaluate(traced.program.jaxpr), list(constants)]
        return traced.run(found[0])

    # Without jit, `lax.scan` would be a Python loop, and trace the body at each step.
    with jax.disable_jit(False):
        shapes = jax.eval_shape(lambda: jax.lax.scan(probe, carry, xs, **options))
    return *found, shapes


def _check_no_effects(program: Program) -> None:
    """Raise an error if the body has an effect that must not run again."""
    for eqn in filter(must_run_once, program.eqns):
        raise ValueError(
            "body must have no effect that must run once, since its steps run again in the "
            f"backward pass, got {label(eqn)!r}. Return the value among the outputs of the step, "
            "carry it, or use jax.lax.scan and jrc.plan, which saves it."
        )


def _step(
    run: Callable[..., Sequence[Any]], carries: int
) -> Callable[..., tuple[list[Any], list[Any]]]:
    """Return the body on lists: `(constants, carry, x) -> (carry, y)`."""

    def step(*groups: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        out = [jnp.asarray(x) for x in run(*(x for group in groups for x in group))]
        return out[:carries], out[carries:]

    return step


def _as_type(leaf: Any, shape: Any) -> Any:
    """Return a leaf as an array of the shape's dtype; the same array if it has that dtype.

    Then the saved value is the argument itself, not a copy of it.
    """
    if isinstance(leaf, jax.Array) and (shape is None or leaf.dtype == shape.dtype):
        return leaf
    return jnp.asarray(leaf, None if shape is None or shape.weak_type else shape.dtype)
