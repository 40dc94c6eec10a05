"""Whether a choice that was read from text can be one of a program: it may have been edited.

>>> from jrc.remat._planner.decision import Piece
>>> check_choice(Choice((Piece((0, 1)), Piece((1, 2)))), 3)
Traceback (most recent call last):
ValueError: choice, piece 1: equation 1 stands there twice
"""

from typing import Any

from jrc._jaxpr import Program, can_rebuild, inner_programs, primitive_name, repeats
from jrc.remat._planner.decision import Choice, Piece, ranges
from jrc.remat._planner.execute import opened


def check_choice(choice: Choice, count: int | None, where: str = "choice") -> set[int]:
    """Raise a `ValueError` where a choice is none for so many equations; `None` is any number.

    Args:
        choice: The choice, as it was read.
        count: How many equations the program has; not known of programs inside of others.
        where: What to call the choice.

    Returns:
        The equations that it speaks of.
    """
    if not _is_count(choice.chunks):
        raise ValueError(f"{where}: chunks {choice.chunks!r} is no whole number from 1")
    seen: set[int] = set()
    for k, piece in enumerate(choice.pieces):
        name = f"{where}, piece {k}"
        _check_positions(piece, seen, count, name)
        _check_held(piece, name)
        if piece.inside is not None:
            check_choice(piece.inside, None, f"{name}, inside")
        seen.update(piece.positions)
    return seen


def left_out(choice: Choice | None, count: int) -> str:
    """In short, which of so many equations a choice does not speak of: no result needs them."""
    pieces = choice.pieces if choice else ()
    found = {p for piece in pieces for p in piece.positions}
    return ranges([p for p in range(count) if p not in found]) if choice else ""


def check_fits(choice: Choice, program: Program, who: str) -> None:
    """Raise a `ValueError` where a choice is not one for this program."""
    try:
        _check_inside(choice, program, "choice")
    except ValueError as error:
        raise ValueError(
            f"{who}: what this plan keeps is not of its program: {error}. The plan was changed "
            "since it was made; plan again with jrc.plan(fn, *args, budget=...)."
        ) from None


def _check_inside(choice: Choice, program: Program, where: str) -> None:
    steps, live = program.steps, program.live()
    found = check_choice(choice, len(steps), where)
    missing = [k for k, p in enumerate(steps) if live[p] and k not in found]
    if missing:
        raise ValueError(f"{where}: equation {missing[0]}, which the result needs, is missing")
    number = {p: k for k, p in enumerate(steps)}
    done: set[int | None] = {None}
    for n, piece in enumerate(choice.pieces):
        name = f"{where}, piece {n}"
        done.update(piece.positions)
        for k in piece.positions:
            needs = [number.get(program.producer[v]) for v in program.sources(steps[k])]
            early = [each for each in needs if each not in done]
            if early:
                raise ValueError(f"{name}: equation {k} runs before {early[0]}, which it needs")
        for k, i in piece.held:
            made = len(program.eqns[steps[k]].outvars)
            if i >= made:
                raise ValueError(f"{name}: result {i} of equation {k} is held, which has {made}")
        if piece.inside is not None:
            _check_construct(piece.inside, program.eqns[steps[piece.positions[0]]], name)


def _check_construct(inside: Choice, eqn: Any, where: str) -> None:
    kind = primitive_name(eqn)
    if not can_rebuild(eqn) or (inside.chunks and kind != "scan"):
        raise ValueError(f"{where}: a {kind} has no inside that can be planned so")
    if inside.chunks > repeats(eqn):
        raise ValueError(f"{where}: {inside.chunks} chunks of a loop of {repeats(eqn)} turns")
    for jaxpr in inner_programs(eqn):
        _check_inside(inside, opened(jaxpr), f"{where}, inside")


def _check_positions(piece: Piece, seen: set[int], count: int | None, where: str) -> None:
    found = piece.positions
    twice = sorted(seen.intersection(found))
    if twice:
        raise ValueError(f"{where}: equation {twice[0]} stands there twice")
    if found != tuple(sorted(set(found))):
        raise ValueError(f"{where}: its equations are not in order, each once")
    if count is not None and found and found[-1] >= count:
        raise ValueError(f"{where}: there is no equation {found[-1]}; the program has {count}")
    strange = sorted(set(piece.again).difference(found))
    if strange:
        raise ValueError(f"{where}: equation {strange[0]} runs again, but is not in it")
    if not piece.region and (len(found) != 1 or piece.held or piece.again):
        raise ValueError(f"{where}: with an inside it is one equation, of which nothing is held")


def _check_held(piece: Piece, where: str) -> None:
    inside = set(piece.positions)
    for p, i in piece.held:
        if not (_is_count(p) and _is_count(i)) or p not in inside:
            raise ValueError(f"{where}: result {i!r} of equation {p!r} is held, but not made in it")


def _is_count(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0
