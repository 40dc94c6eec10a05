"""What an entry of the zoo is: a loss, its arguments, and the blocks that a person would wrap."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

Remat = Mapping[str, Any] | None
"""How blocks are recomputed by hand: not at all, or the options of `jax.checkpoint`."""

_NOISE = 1e-5


@dataclasses.dataclass(frozen=True)
class Program:
    """A program to be planned.

    Attributes:
        build: The loss, its blocks recomputed as the argument says.
        args: Its arguments, as its package's users pass them.
        argnums: What is differentiated.
        has_aux: Whether it returns a pair.
        by_hand: Whether it has blocks; without, `build` ignores its argument.
        ways: Further ways by hand.
        whole: The loss under one checkpoint with a policy; by default the arrays among the
            arguments are those of a `jax.checkpoint`.
        tolerance: Of gradients, relative to a leaf's largest entry.
    """

    build: Callable[[Remat], Callable[..., Any]]
    args: tuple[Any, ...]
    argnums: int | tuple[int, ...] = 0
    has_aux: bool = False
    by_hand: bool = True
    ways: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    whole: Callable[[Remat], Callable[..., Any]] | None = None
    tolerance: float = 1e-5

    @property
    def loss(self) -> Callable[..., Any]:
        """The loss as it is written."""
        return self.build(None)

    def under_one(self, remat: Remat) -> Callable[..., Any]:
        """Return the loss under one checkpoint."""
        return self.whole(remat) if self.whole else whole(self.loss, remat or {})


def wrapped(block: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """Return a block of arrays, recomputed as `remat` says."""
    return block if remat is None else jax.checkpoint(block, **remat)


def whole(loss: Callable[..., Any], remat: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a loss under one `jax.checkpoint` of the arrays among its arguments."""

    def run(*args: Any) -> Any:
        leaves, treedef = jax.tree.flatten(args)
        at = [i for i, x in enumerate(leaves) if is_array(x)]

        def flat(arrays: Any) -> Any:
            new = dict(zip(at, arrays, strict=True))
            return loss(*treedef.unflatten(new.get(i, x) for i, x in enumerate(leaves)))

        return jax.checkpoint(flat, **remat)([leaves[i] for i in at])

    return run


def gradient(program: Program, loss: Callable[..., Any]) -> tuple[Callable[..., Any], list[Any]]:
    """Return value and gradient of a loss as a function of arrays, and the arrays.

    What is no array is bound, as `equinox.filter_jit` and `nnx.jit` do; what is differentiated are
    the floating arrays in the arguments of `argnums`.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(program.args)
    leaves = [leaf for _, leaf in paths]
    argnums = (program.argnums,) if isinstance(program.argnums, int) else program.argnums
    arrays = [i for i, x in enumerate(leaves) if is_array(x)]
    chosen = [i for i in arrays if paths[i][0][0].idx in argnums and _is_floating(leaves[i])]

    def run(*inputs: Any) -> Any:
        values = dict(zip(arrays, inputs, strict=True))

        def of(perturbed: Any) -> tuple[Any, Any]:
            new = values | dict(zip(chosen, perturbed, strict=True))
            args = treedef.unflatten(new.get(i, x) for i, x in enumerate(leaves))
            out = loss(*args)
            value, aux = out if program.has_aux else (out, None)
            return value, [x for x in jax.tree.leaves(aux) if is_array(x)]

        return jax.value_and_grad(of, has_aux=True)([values[i] for i in chosen])

    return run, [leaves[i] for i in arrays]


def gradient_error(got: Any, plain: Any) -> float:
    """Return the largest difference of two gradients, relative to a leaf's largest entry.

    A leaf whose entries are all rounding noise (the bias in front of a batch normalisation) is
    compared relative to the largest entry of all leaves.
    """
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(plain), strict=True))
    pairs = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in pairs if x.size]
    sizes = [float(np.max(np.abs(y))) for _, y in pairs]
    most = max(sizes, default=0.0)
    errors = [
        float(np.max(np.abs(x - y))) / (size if size > _NOISE * most else most or 1.0)
        for (x, y), size in zip(pairs, sizes, strict=True)
    ]
    return max(errors, default=0.0)


def is_array(leaf: Any) -> bool:
    """Return whether a leaf is an array of JAX or NumPy, tracers included."""
    return isinstance(leaf, jax.Array | np.ndarray)


def _is_floating(leaf: Any) -> bool:
    return jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)
