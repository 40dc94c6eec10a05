"""Reading a decision from the data of a stored plan; an error names the entry.

>>> decision_from_data({"stages": [{"region": "0-2", "saved": [[1, 0]]}]}).regions[0].saved
((1, 0),)
"""

from collections.abc import Callable, Mapping
from typing import Any, get_args

from jrc.remat._planner.costs.compilers import WithoutBarrier
from jrc.remat._planner.plan.decision import (
    AsWritten,
    Baseline,
    Branches,
    Decision,
    LeftToJax,
    Loop,
    LoopPart,
    Mapped,
    Place,
    Region,
    Stage,
    Stages,
)

# More equations than any program has, so that a mistyped range does not fill the memory.
_MOST_EQUATIONS = 10**7


def decision_from_data(data: Any) -> Decision:
    """Return the decision that `to_data` described.

    Raises:
        ValueError: If the data describes none.
    """
    whole = {each.to_data(): each for each in (Baseline(), AsWritten())}
    return whole[data] if isinstance(data, str) and data in whole else _stages(data)


def _stages(data: Any) -> Stages:
    found = _fields(data, "stages", "offloaded", "without_barrier", "in_order")
    stages = [_named(f"stage {k}", _stage, each) for k, each in enumerate(_list(data, "stages"))]
    offloaded = _named("offloaded", _places, found.get("offloaded", ()))
    without, known = found.get("without_barrier", "none"), get_args(WithoutBarrier)
    if without not in known:
        raise ValueError(f"without_barrier must be one of {', '.join(known)}, got {without!r:.80}")
    return Stages(tuple(stages), offloaded, without, _flag(found, "in_order", default=False))


def _flag(found: dict[str, Any], name: str, default: bool) -> bool:
    flag = found.get(name, default)
    if not isinstance(flag, bool):
        raise ValueError(f"{name} must be a bool, got {flag!r}")
    return flag


def _list(data: Any, name: str) -> list[Any]:
    if not isinstance(data.get(name), list):
        raise ValueError(f"{name} must be a list, got {data.get(name)!r:.80}")
    return data[name]


def _named[T](name: str, read: Callable[[Any], T], data: Any) -> T:
    """What is read of an entry; an error names the entry."""
    try:
        return read(data)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None


def _stage(data: Any) -> Stage:
    kind = next((kind for kind in _KINDS if isinstance(data, dict) and kind in data), None)
    if kind is None:
        raise ValueError(f"a stage is one of {', '.join(_KINDS)}, got {data!r:.80}")
    return _KINDS[kind](data)


def _region(data: Any) -> Region:
    found = _fields(data, "region", "saved", "recomputed", "by_name")
    by_name = _flag(found, "by_name", default=True)
    return Region(
        _named("region", numbers_in, data["region"]),
        _named("saved", _places, found.get("saved", ())),
        _named("recomputed", numbers_in, found.get("recomputed", "")),
        by_name,
    )


def _left_to_jax(data: Any) -> LeftToJax:
    return LeftToJax(numbers_in(_fields(data, "left_to_jax")["left_to_jax"]))


def _loop(data: Any) -> Loop:
    _fields(data, "loop", "parts")
    parts = [_named(f"part {k}", _loop_part, x) for k, x in enumerate(_list(data, "parts"))]
    return Loop(_whole(data["loop"], "loop"), tuple(parts))


def _loop_part(data: Any) -> LoopPart:
    found = _fields(data, "steps", "body", "segments")
    steps = _whole(data["steps"], "steps", least=1)
    return LoopPart(steps, _stages(data["body"]), _whole(found.get("segments", 0), "segments"))


def _branches(data: Any) -> Branches:
    _fields(data, "cond", "branches")
    branches = tuple(
        None if each is None else _named(f"branch {k}", _stages, each)
        for k, each in enumerate(_list(data, "branches"))
    )
    return Branches(_whole(data["cond"], "cond"), branches)


def _mapped(data: Any) -> Mapped:
    _fields(data, "mapped", "body")
    return Mapped(_whole(data["mapped"], "mapped"), _stages(data["body"]))


_KINDS: Mapping[str, Callable[[Any], Stage]] = {
    "region": _region,
    "left_to_jax": _left_to_jax,
    "loop": _loop,
    "cond": _branches,
    "mapped": _mapped,
}


def _fields(data: Any, *names: str) -> dict[str, Any]:
    """The data, if it is a mapping with these fields alone."""
    if not isinstance(data, dict) or (strange := set(data).difference(names)):
        what = f"the field {min(strange)!r}" if isinstance(data, dict) else f"{data!r:.80}"
        raise ValueError(f"expected {', '.join(names)}, got {what}")
    return data


def _whole(number: Any, name: str, least: int = 0) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        raise ValueError(f"{name} must be a whole number >= {least}, got {number!r}")
    return number


def _places(data: Any) -> tuple[Place, ...]:
    pairs = [tuple(pair) for pair in data]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError("a value is a pair: an equation, and which of its results")
    return tuple((_whole(p, "equation", least=-1), _whole(i, "result")) for p, i in pairs)


def numbers_in(text: Any) -> tuple[int, ...]:
    """Return the whole numbers that `ranges_text` wrote."""
    if not isinstance(text, str):
        raise ValueError(f"equations are text such as '0-4,7', got {text!r:.80}")
    parts = [part.partition("-") for part in text.split(",") if part]
    runs = [range(int(first), int(last or first) + 1) for first, _, last in parts]
    if any(not 0 < len(run) < _MOST_EQUATIONS for run in runs):
        raise ValueError(f"{text!r} is no list of equations")
    return tuple(n for run in runs for n in run)
