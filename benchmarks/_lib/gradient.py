"""What a gradient program needs: bytes as XLA states them, saved bytes and FLOPs as jrc counts.

Nothing is run. `Cache` keeps what XLA states: a program with the same text is not compiled twice
under the same version.
"""

import hashlib
import json
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib

from benchmarks._private import (
    PRODUCTS,
    Program,
    equation_flops,
    facts_of,
    inline_all,
    inner_programs,
    is_variable,
    memory_of,
    nbytes,
    primitive_name,
)

_COMPILED_PRODUCTS = (" dot(", " convolution(")
# JAX lists 1 - y^2 beside a saved y = tanh(x); XLA computes it where it is read.
_FROM_SAVED = ("one_minus_square",)

# On a CPU most of the compile time goes into machine code, which no buffer depends on.
QUICK = {"xla_backend_optimization_level": 0}
# Without fusion rounding does not depend on what stands beside an operator.
UNFUSED = QUICK | {"xla_disable_hlo_passes": "fusion"}


class Cache:
    """What XLA states of programs, in one file of a folder, or in memory without a folder.

    With `quick` XLA does not optimise their machine code.
    """

    def __init__(self, folder: pathlib.Path | None, quick: bool = False) -> None:
        self.options = QUICK if quick else {}
        self.path = folder and folder / "compiled.json"
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
        self.found = json.loads(self.path.read_text()) if self.path and self.path.exists() else {}

    def of(self, text: str, answer: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what is known of a program's text; call `answer` if nothing is."""
        salt = (jax.__version__, jaxlib.__version__, jax.default_backend(), self.options)
        flags = os.environ.get("XLA_FLAGS", "")
        key = hashlib.sha256(repr((salt, flags, text)).encode()).hexdigest()
        if key not in self.found:
            self.found[key] = answer()
            self._write()
        return self.found[key]

    def _write(self) -> None:
        if self.path:
            new = self.path.with_suffix(f".{os.getpid()}")
            new.write_text(json.dumps(self.found, indent=1))
            new.replace(self.path)


def measure(
    fn: Callable[..., Any], args: tuple[Any, ...], has_aux: bool, cache: Cache
) -> dict[str, Any]:
    """Return all figures of the gradient program of `fn` for its first argument."""
    program = jax.value_and_grad(fn, has_aux=has_aux)
    lowered = jax.jit(program).lower(*args)
    return counts(fn, args, has_aux) | cache.of(
        lowered.as_text(), lambda: _compiled(lowered, cache.options)
    )


def _compiled(lowered: Any, options: dict[str, Any]) -> dict[str, Any]:
    began = time.perf_counter()
    compiled = lowered.compile(compiler_options=options)
    seconds, memory = time.perf_counter() - began, memory_of(compiled)
    text = compiled.as_text()
    return {
        "peak": memory.peak,
        "arguments": memory.arguments,
        "outputs": memory.outputs,
        "temporaries": memory.temporaries,
        "compiled_products": sum(text.count(name) for name in _COMPILED_PRODUCTS),
        "compile_seconds": seconds,
    }


def counts(fn: Callable[..., Any], args: tuple[Any, ...], has_aux: bool) -> dict[str, int]:
    """Count in the traced program, without compiling it.

    Returns:
        `saved` bytes; `flops` and `product_flops`, loops times their length; `products`, the matrix
        products in the program, a loop's body once.
    """
    jaxpr = jax.make_jaxpr(jax.value_and_grad(fn, has_aux=has_aux))(*args)
    return {
        "saved": saved_bytes(fn, args, has_aux),
        "flops": total(jaxpr, equation_flops),
        "product_flops": total(jaxpr, lambda eqn: _is_product(eqn) and equation_flops(eqn)),
        "products": total(jaxpr, _is_product, loops=False),
    }


def largest_error(tree: Any, other: Any) -> float:
    """Return the largest difference of two trees, relative to a leaf's largest entry."""
    errors = jax.tree.map(
        lambda x, y: jnp.max(jnp.abs(x - y)) / jnp.maximum(jnp.max(jnp.abs(y)), 1e-30), tree, other
    )
    return float(jnp.max(jnp.stack(jax.tree.leaves(errors))))


def _is_product(eqn: Any) -> bool:
    return primitive_name(eqn) in PRODUCTS


def total(jaxpr: Any, of: Callable[[Any], int], loops: bool = True, wanted: Any = None) -> int:
    """Return the sum of `of` over the equations that the results depend on, at every depth."""
    program = Program(inline_all(jaxpr))
    outvars = program.jaxpr.outvars
    outvars = [v for v, w in zip(outvars, wanted or [True] * len(outvars), strict=True) if w]
    live = program.live(outvars)
    used = {v for v in outvars if is_variable(v)}
    used |= {v for i, alive in enumerate(live) if alive for v in program.reads(i)}
    return sum(
        _total_of(eqn, of, loops, used)
        for eqn, alive in zip(program.eqns, live, strict=True)
        if alive
    )


def _total_of(eqn: Any, of: Callable[[Any], int], loops: bool, used: set[Any]) -> int:
    inner = inner_programs(eqn)
    if not inner:
        return int(of(eqn))
    name = primitive_name(eqn)
    wanted = None
    if len(inner) == 1 and len(inner[0].outvars) == len(eqn.outvars):
        # A loop's carry counts as wanted: the next iteration may read it.
        wanted = [
            var in used or (name == "scan" and var.aval.shape == result.aval.shape)
            for var, result in zip(eqn.outvars, inner[0].outvars, strict=True)
        ]
    sums = [total(jaxpr, of, loops, wanted) for jaxpr in inner]
    times = eqn.params["length"] if name == "scan" and loops else 1
    return times * (max(sums) if name == "cond" else sum(sums))


def saved_bytes(fn: Callable[..., Any], args: tuple[Any, ...], has_aux: bool) -> int:
    """Return the bytes of the residuals of the derivative for the first argument.

    Each buffer counts once, a name or a reshape of it not again, and arguments do not count.
    Neither does a value that depends on no argument, since XLA computes it where it is read.
    `jrc.explain` lists those as well, and 1 - y^2 beside a saved y.
    """

    def residuals(first: Any, *rest: Any) -> list[Any]:
        vjp = jax.vjp(lambda first: fn(first, *rest), first, has_aux=has_aux)[1]
        return jax.tree.leaves(vjp)

    jaxpr = inline_all(jax.make_jaxpr(residuals)(*args))
    source: dict[Any, Any] = {}
    made: set[Any] = set(jaxpr.invars)
    for eqn in jaxpr.eqns:
        if made.intersection(v for v in eqn.invars if is_variable(v)):
            made.update(eqn.outvars)
        if facts_of(eqn).is_view or primitive_name(eqn) in _FROM_SAVED:
            for given, result in zip(eqn.invars, eqn.outvars, strict=False):
                source[result] = source.get(given, given) if is_variable(given) else given
    kept = {source.get(v, v) for v in jaxpr.outvars if is_variable(v)}
    return sum(nbytes(v.aval) for v in kept & (made - set(jaxpr.invars)))
