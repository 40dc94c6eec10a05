"""Running a program as a choice says."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jrc._jaxpr import INPUT, Program, evaluate, inline_marked, rebuild
from jrc._tree import is_floating, is_typed_key
from jrc.remat._again import planned
from jrc.remat._apply import run_cut
from jrc.remat._barrier import barrier
from jrc.remat._cut import Cut
from jrc.remat._planning.choice import Choice, Piece
from jrc.remat._region import rerun_region
from jrc.remat._say import HELD, Say

Run = Callable[..., Sequence[Any]]


def opened(jaxpr: Any) -> Program:
    """A program inside another, without `jit` calls."""
    return Program(inline_marked(jaxpr, lambda _: True))


def run_choice(program: Program, choice: Choice) -> Run:
    """The program as a function of its inputs, of which the choice says what is kept."""

    def run(*inputs: Any) -> list[Any]:
        values: dict[Any, Any] = dict(zip(program.jaxpr.invars, inputs, strict=True))
        values |= dict(zip(program.jaxpr.constvars, program.jaxpr.consts, strict=True))
        for piece in choice.pieces:
            with planned() if piece.region else contextlib.nullcontext():
                _run_piece(program, piece, values)
        return program.results(values)

    return run


def _run_piece(program: Program, piece: Piece, values: dict[Any, Any]) -> None:
    if piece.region:
        held = {program.eqns[p].outvars[i]: HELD for p, i in piece.held}
        _run_region(program, Cut((), True, True, piece.positions, held), values)
        return
    (p,) = piece.positions
    run = construct(program, p, piece.inside)
    results = run(*(values[v] for v in program.reads(p)))
    values |= dict(zip(program.eqns[p].outvars, results, strict=True))


def _run_region(program: Program, cut: Cut, values: dict[Any, Any]) -> None:
    """Run a region whose random draws wait for the data that they meet.

    Draws depend on keys alone: XLA begins those of all layers at once, and keeps what it began.
    """
    read = program.cut(cut.positions).invars
    keys = [v for v in read if is_typed_key(v.aval) or _is_raw_key(v.aval)]
    data = [values[v] for v in read if is_floating(v.aval) and program.producer[v] != INPUT]
    waiting = dict(values)
    if keys and data:
        held = barrier([*(values[v] for v in keys), jax.lax.stop_gradient(data[-1])])
        waiting |= dict(zip(keys, held, strict=False))
    # With `jax_remat3` a result that is held inside and goes on is kept twice.
    own_inside = not getattr(jax.config, "jax_remat3", False)
    run_cut(program, cut, Say(), waiting, rerun_region, own_inside=own_inside)
    values |= {
        v: waiting[v] for p in cut.positions for v in program.eqns[p].outvars if v in waiting
    }


def _is_raw_key(aval: Any) -> bool:
    return str(aval.dtype) == "uint32" and aval.ndim <= 2 and aval.size <= 64


def construct(program: Program, p: int, inside: Choice | None) -> Run:
    """A loop, or another equation with a program inside, as a function of what it reads."""
    eqn = program.eqns[p]
    if inside is None:
        return evaluate(program.cut([p], eqn.outvars))
    loop = functools.partial(_in_chunks, inside.chunks) if inside.chunks else jax.lax.scan
    body = lambda jaxpr: run_choice(opened(jaxpr), inside)  # noqa: E731
    return program.run(p, rebuild(eqn, body, loop))


def _in_chunks(
    chunks: int,
    body: Callable[..., Any],
    carry: Sequence[Any],
    xs: Sequence[Any],
    *,
    length: int,
    reverse: bool,
    unroll: int,
) -> tuple[Sequence[Any], Sequence[Any]]:
    """`lax.scan` in equal parts that are run again one by one; what is left over runs last."""
    size = length // chunks
    scan = functools.partial(jax.lax.scan, body, reverse=reverse, unroll=unroll)
    rest = length - size * chunks
    first = slice(rest, None) if reverse else slice(0, length - rest)
    last = slice(0, rest) if reverse else slice(length - rest, None)

    def chunk(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[Any, Any]:
        def flat(*inputs: Any) -> list[Any]:
            new, ys = scan(list(inputs[: len(carry)]), list(inputs[len(carry) :]), length=size)
            return [*new, *ys]

        # Not `rerun_region`, which would keep what the regions inside hold.
        with planned():
            results = jax.checkpoint(flat)(*carry, *xs)
        return results[: len(carry)], results[len(carry) :]

    parts = [x[first].reshape(chunks, size, *x.shape[1:]) for x in xs]
    carry, ys = jax.lax.scan(chunk, list(carry), parts, length=chunks, reverse=reverse)
    ys = [y.reshape(chunks * size, *y.shape[2:]) for y in ys]
    if not rest:
        return carry, ys
    carry, more = scan(list(carry), [x[last] for x in xs], length=rest)
    pairs = [(new, y) if reverse else (y, new) for y, new in zip(ys, more, strict=True)]
    return carry, [jax.numpy.concatenate(pair) for pair in pairs]
