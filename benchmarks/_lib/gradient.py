"""What a gradient program needs: bytes as XLA states them, saved bytes and FLOPs as jrc counts.

Nothing is run. What XLA says of a program is kept in `--cache`: the same text under the same
version is not compiled twice.
"""

import hashlib
import json
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jaxlib

from jrc._jaxpr import (
    Program,
    equation_flops,
    inline_all,
    inner_programs,
    is_variable,
    mark_of,
    nbytes,
    primitive_name,
)
from jrc.remat._memory import memory_of

PRODUCTS = ("dot_general", "conv_general_dilated")
_COMPILED_PRODUCTS = (" dot(", " convolution(")
# What only names or reshapes a value keeps the same bytes; 1 - y² of a kept tanh, which JAX lists
# beside it, XLA makes anew where it is read.
_VIEWS = frozenset(
    "name CheckpointName gate reduce_precision optimization_barrier reshape squeeze expand_dims "
    "copy one_minus_square".split()
)


# On CPU most of the time goes into machine code, on which no byte of the buffers depends.
QUICK = {"xla_backend_optimization_level": 0}
# Rounds alike whatever is re-run: where XLA joins operators depends on what stands beside them.
UNFUSED = QUICK | {"xla_disable_hlo_passes": "fusion"}


class Cache:
    """What XLA says of programs, in one file; without a folder only while it lives.

    With `quick` their machine code is not optimised.
    """

    def __init__(self, folder: pathlib.Path | None, quick: bool = False) -> None:
        self.options = QUICK if quick else {}
        self.path = folder and folder / "compiled.json"
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
        self.found = json.loads(self.path.read_text()) if self.path and self.path.exists() else {}

    def of(self, text: str, answer: Callable[[], dict[str, Any]]) -> dict[str, Any]:
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
    """All figures of the gradient program of `fn`, of its first argument."""
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
    """What the program itself tells, without compiling it.

    Returns:
        `saved` bytes, `flops` and `product_flops` with loops times their length, and `products`,
        how many stand in the program, as it is written.
    """
    jaxpr = jax.make_jaxpr(jax.value_and_grad(fn, has_aux=has_aux))(*args)
    return {
        "saved": saved_bytes(fn, args, has_aux),
        "flops": total(jaxpr, equation_flops),
        "product_flops": total(jaxpr, lambda eqn: _is_product(eqn) and equation_flops(eqn)),
        "products": total(jaxpr, _is_product, loops=False),
    }


def _is_product(eqn: Any) -> bool:
    return primitive_name(eqn) in PRODUCTS


def total(jaxpr: Any, of: Callable[[Any], int], loops: bool = True, wanted: Any = None) -> int:
    """The sum over all equations that the results depend on, at every depth."""
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
        # A loop's carry, which is not stacked, counts as wanted: the next round may read it.
        wanted = [
            var in used or (name == "scan" and var.aval.shape == result.aval.shape)
            for var, result in zip(eqn.outvars, inner[0].outvars, strict=True)
        ]
    sums = [total(jaxpr, of, loops, wanted) for jaxpr in inner]
    times = eqn.params["length"] if name == "scan" and loops else 1
    return times * (max(sums) if name == "cond" else sum(sums))


def saved_bytes(fn: Callable[..., Any], args: tuple[Any, ...], has_aux: bool) -> int:
    """What the derivative for the first argument keeps: each buffer once, without what it is given.

    What depends on no argument, XLA makes anew where it is read.
    """

    def residuals(first: Any, *rest: Any) -> list[Any]:
        pull = jax.vjp(lambda first: fn(first, *rest), first, has_aux=has_aux)[1]
        return jax.tree.leaves(pull)

    jaxpr = inline_all(jax.make_jaxpr(residuals)(*args))
    source: dict[Any, Any] = {}
    made: set[Any] = set(jaxpr.invars)
    for eqn in jaxpr.eqns:
        if made.intersection(v for v in eqn.invars if is_variable(v)):
            made.update(eqn.outvars)
        if mark_of(eqn) is not None or primitive_name(eqn) in _VIEWS:
            for given, result in zip(eqn.invars, eqn.outvars, strict=False):
                source[result] = source.get(given, given) if is_variable(given) else given
    kept = {source.get(v, v) for v in jaxpr.outvars if is_variable(v)}
    return sum(nbytes(v.aval) for v in kept & (made - set(jaxpr.invars)))
