"""A decision: which values of a program are saved, and which equations are recomputed.

The decision for a program is a sequence of stages: a range of equations that is one recomputed
region, a range that is left to JAX, or one construct (a loop, a conditional, a `shard_map`) with
decisions for the programs inside of it. `bodies` and `walk` go through a program and its decision
together.

>>> Stages((Region((0, 1, 2), saved=((1, 0),)),)).to_data()
{'stages': [{'region': '0-2', 'saved': [[1, 0]]}]}
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jrc._jaxpr import Program, inner_program, inner_programs, repeats
from jrc.remat._planner.program.trace import inlined_program

Place = tuple[int, int]
"""A value: the number of the equation that makes it, and which of its results it is."""

# More equations than any program has, so that a mistyped range does not fill the memory.
_MOST_EQUATIONS = 10**7


@dataclasses.dataclass(frozen=True)
class Region:
    """Equations that run as one recomputed region.

    Attributes:
        equations: In program order, numbered without casts to vary over a mesh axis.
        saved: Their results that are saved for the backward pass.
        recomputed: The equations that the backward pass runs again.
        by_name: Whether the region saves these results under a name, and reads them in its own
            backward pass. Else it is a bare `jax.checkpoint`, and other regions read them.
    """

    equations: tuple[int, ...]
    saved: tuple[Place, ...] = ()
    recomputed: tuple[int, ...] = ()
    by_name: bool = True

    def to_data(self) -> dict[str, Any]:
        """Return the region as plain data for JSON."""
        data: dict[str, Any] = {"region": ranges_text(self.equations)}
        if self.saved:
            data["saved"] = _pairs(self.saved)
        if self.recomputed:
            data["recomputed"] = ranges_text(self.recomputed)
        return data if self.by_name else data | {"by_name": False}


@dataclasses.dataclass(frozen=True)
class LeftToJax:
    """Equations of which JAX saves what their derivatives read."""

    equations: tuple[int, ...]

    def to_data(self) -> dict[str, Any]:
        """Return the stage as plain data for JSON."""
        return {"left_to_jax": ranges_text(self.equations)}


@dataclasses.dataclass(frozen=True)
class LoopPart:
    """Steps of a loop that run under one decision.

    Attributes:
        steps: How many steps.
        body: The decision for each step.
        chunks: Into how many chunks the steps are cut. Only the carries between chunks are saved,
            and each chunk is recomputed in turn; 0 is no cut.
    """

    steps: int
    body: "Stages"
    chunks: int = 0

    def to_data(self) -> dict[str, Any]:
        """Return the part as plain data for JSON."""
        data = {"steps": self.steps, "body": self.body.to_data()}
        return data | {"chunks": self.chunks} if self.chunks else data


@dataclasses.dataclass(frozen=True)
class Loop:
    """A `lax.scan`, in one part or several, in the order in which they run."""

    equation: int
    parts: tuple[LoopPart, ...]

    @property
    def equations(self) -> tuple[int, ...]:
        """The loop's equation."""
        return (self.equation,)

    def to_data(self) -> dict[str, Any]:
        """Return the loop as plain data for JSON."""
        return {"loop": self.equation, "parts": [part.to_data() for part in self.parts]}


@dataclasses.dataclass(frozen=True)
class Branches:
    """A `lax.cond` or `lax.switch`: a decision for each branch; `None` leaves a branch to JAX."""

    equation: int
    branches: "tuple[Stages | None, ...]"

    @property
    def equations(self) -> tuple[int, ...]:
        """The conditional's equation."""
        return (self.equation,)

    def to_data(self) -> dict[str, Any]:
        """Return the conditional as plain data for JSON."""
        branches = [each and each.to_data() for each in self.branches]
        return {"cond": self.equation, "branches": branches}


@dataclasses.dataclass(frozen=True)
class Mapped:
    """A `shard_map`: a decision for the program that every device runs."""

    equation: int
    body: "Stages"

    @property
    def equations(self) -> tuple[int, ...]:
        """The `shard_map`'s equation."""
        return (self.equation,)

    def to_data(self) -> dict[str, Any]:
        """Return the `shard_map` as plain data for JSON."""
        return {"mapped": self.equation, "body": self.body.to_data()}


Construct = Loop | Branches | Mapped
Stage = Region | LeftToJax | Construct


@dataclasses.dataclass(frozen=True)
class Stages:
    """The decision for a program.

    Attributes:
        stages: Its equations, in the order in which they run.
        offloaded: The saved values that lie in the host's memory until the backward pass reads
            them; -1 is the equation of what the program is given.
    """

    stages: tuple[Stage, ...]
    offloaded: tuple[Place, ...] = ()

    @property
    def regions(self) -> tuple[Region, ...]:
        """The recomputed regions among the stages."""
        return tuple(stage for stage in self.stages if isinstance(stage, Region))

    @property
    def recomputes(self) -> bool:
        """Whether anything is recomputed, at any depth."""
        return any(map(_recomputes, self.stages))

    def stage_of(self, equation: int) -> Stage | None:
        """Return the stage that an equation is part of."""
        return next((stage for stage in self.stages if equation in stage.equations), None)

    def to_data(self) -> dict[str, Any]:
        """Return the decision as plain data for JSON."""
        data: dict[str, Any] = {"stages": [stage.to_data() for stage in self.stages]}
        return data | {"offloaded": _pairs(self.offloaded)} if self.offloaded else data


def _recomputes(stage: Stage) -> bool:
    match stage:
        case Region():
            return bool(stage.recomputed)
        case Loop():
            return any(part.chunks or part.body.recomputes for part in stage.parts)
        case Branches():
            return any(branch is not None and branch.recomputes for branch in stage.branches)
        case Mapped():
            return stage.body.recomputes
        case _:
            return False


@dataclasses.dataclass(frozen=True)
class Baseline:
    """Nothing is recomputed: the function without `jax.checkpoint` regions."""

    def to_data(self) -> str:
        """Return the decision as plain data for JSON."""
        return "baseline"


@dataclasses.dataclass(frozen=True)
class AsWritten:
    """The function runs under the `jax.checkpoint` regions that its user wrote."""

    def to_data(self) -> str:
        """Return the decision as plain data for JSON."""
        return "as written"


Decision = Stages | Baseline | AsWritten


def decision_from_data(data: Any) -> Decision:
    """Return the decision that `to_data` described.

    Raises:
        ValueError: If the data describes none.
    """
    whole = {each.to_data(): each for each in (Baseline(), AsWritten())}
    return whole[data] if isinstance(data, str) and data in whole else _stages(data)


def _stages(data: Any) -> Stages:
    found = _fields(data, "stages", "offloaded")
    stages = [_named(f"stage {k}", _stage, each) for k, each in enumerate(_list(data, "stages"))]
    return Stages(tuple(stages), _named("offloaded", _places, found.get("offloaded", ())))


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
    by_name = found.get("by_name", True)
    if not isinstance(by_name, bool):
        raise ValueError(f"by_name must be a bool, got {by_name!r}")
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
    found = _fields(data, "steps", "body", "chunks")
    steps = _whole(data["steps"], "steps", least=1)
    return LoopPart(steps, _stages(data["body"]), _whole(found.get("chunks", 0), "chunks"))


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


def _pairs(places: Sequence[Place]) -> list[list[int]]:
    return [list(place) for place in places]


def ranges_text(numbers: Sequence[int]) -> str:
    """Return whole numbers as ranges: `0-4,7`."""
    runs = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ends = [[n for _, n in run] for _, run in runs]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in ends)


def numbers_in(text: Any) -> tuple[int, ...]:
    """Return the whole numbers that `ranges_text` wrote."""
    if not isinstance(text, str):
        raise ValueError(f"equations are text such as '0-4,7', got {text!r:.80}")
    parts = [part.partition("-") for part in text.split(",") if part]
    runs = [range(int(first), int(last or first) + 1) for first, _, last in parts]
    if any(not 0 < len(run) < _MOST_EQUATIONS for run in runs):
        raise ValueError(f"{text!r} is no list of equations")
    return tuple(n for run in runs for n in run)


@dataclasses.dataclass(frozen=True)
class Body:
    """A program inside of a construct, and the decision for it.

    Attributes:
        name: Where it stands, for errors: `part 0`, `branch 1`, `inside`.
        program: The program.
        decision: Its decision; `None` leaves it to JAX.
        times: How often it runs each time that the construct does.
    """

    name: str
    program: Program
    decision: Stages | None
    times: int = 1


def bodies(program: Program, stage: Stage) -> list[Body]:
    """Return the programs inside of a stage with their decisions; none of what is no construct."""
    match stage:
        case Loop():
            inner = inlined_program(inner_program(_equation(program, stage)))
            return [
                Body(f"part {k}", inner, part.body, part.steps)
                for k, part in enumerate(stage.parts)
            ]
        case Branches():
            pairs = zip(inner_programs(_equation(program, stage)), stage.branches, strict=True)
            return [
                Body(f"branch {k}", inlined_program(jaxpr), branch)
                for k, (jaxpr, branch) in enumerate(pairs)
            ]
        case Mapped():
            eqn = _equation(program, stage)
            inner = inlined_program(inner_program(eqn))
            return [Body("inside", inner, stage.body, repeats(eqn))]
        case _:
            return []


def walk(
    program: Program,
    decision: Stages,
    times: int = 1,
    enter: Callable[[Program, Construct], bool] = lambda program, construct: True,
) -> Iterator[tuple[Program, Stages, int]]:
    """Yield a program with its decision and how often it runs, then all programs inside.

    Args:
        program: The program.
        decision: Its decision.
        times: How often it runs.
        enter: Whether the programs inside of a construct are visited.
    """
    yield program, decision, times
    for stage in decision.stages:
        if isinstance(stage, Construct) and enter(program, stage):
            for body in bodies(program, stage):
                if body.decision is not None:
                    yield from walk(body.program, body.decision, times * body.times, enter)


def _equation(program: Program, stage: Construct) -> Any:
    return program.eqns[program.steps[stage.equation]]


def variable_at(program: Program, place: Place) -> Any:
    """Return the variable that a decision calls by its equation and number; -1 is the inputs."""
    k, i = place
    return (program.jaxpr.invars if k < 0 else program.eqns[program.steps[k]].outvars)[i]
