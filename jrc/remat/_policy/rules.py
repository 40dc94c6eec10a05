"""Rules for what is saved and what is recomputed: small values that combine with `|`."""

import dataclasses
from collections.abc import Iterable

from jrc._errors import listed, public, running_name


class Rule:
    """One rule, or several joined with `|`: frozen, hashable, and printed as it is written."""

    def __or__(self, other: "Rule") -> "Rules":
        """Return both rules as one."""
        if not isinstance(other, Rule):
            return NotImplemented
        return Rules((*self.parts, *other.parts))

    @property
    def parts(self) -> tuple["Rule", ...]:
        """The single rules that this one is made of."""
        return (self,)


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Save(Rule):
    """Saves the values with these marks; everything else is recomputed.

    The value itself is saved. An operator whose derivative reads its own result (`tanh`, `exp`,
    `sigmoid`, `relu`) then needs nothing that comes before it. One whose derivative reads its
    operand (`gelu`, `sin`) has the operand recomputed: save the operand, or call the operator
    through `jrc.keep_op`.

    Attributes:
        names: Marks, as given to `jrc.mark` or `jax.ad_checkpoint.checkpoint_name`.
    """

    names: tuple[str, ...]

    @public("jrc.Save")
    def __init__(self, *names: str):
        object.__setattr__(self, "names", _checked("mark", names))

    def __repr__(self) -> str:
        return f"Save({listed(self.names)})"


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class SavePrimitives(Rule):
    """Saves every result of these operators; everything else is recomputed.

    Attributes:
        names: Primitives as a program prints them (`dot_general`, `tanh`), or names of functions
            that are a call in the program (`gelu`, `relu`, `softmax`).
    """

    names: tuple[str, ...]

    @public("jrc.SavePrimitives")
    def __init__(self, *names: str):
        object.__setattr__(self, "names", _checked("primitive", names))

    def __repr__(self) -> str:
        return f"SavePrimitives({listed(self.names)})"


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class RecomputePrimitives(Rule):
    """Recomputes every result of these operators; alone, it leaves all other values to JAX.

    Attributes:
        names: As for `SavePrimitives`.
    """

    names: tuple[str, ...]

    @public("jrc.RecomputePrimitives")
    def __init__(self, *names: str):
        object.__setattr__(self, "names", _checked("primitive", names))

    def __repr__(self) -> str:
        return f"RecomputePrimitives({listed(self.names)})"


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Offload(Rule):
    """Saves the values with these marks in another memory; everything else is recomputed.

    XLA schedules the copies there and back, and overlaps them with computation. Values that the
    part after the last boundary reads stay on the device: the backward pass begins there.

    Attributes:
        names: Marks, as given to `jrc.mark`.
        to: The memory kind, `"pinned_host"` by default.
    """

    names: tuple[str, ...]
    to: str

    @public("jrc.Offload")
    def __init__(self, *names: str, to: str = "pinned_host"):
        object.__setattr__(self, "names", _checked("mark", names))
        if not isinstance(to, str) or not to:
            raise TypeError(
                f"to must be the name of a memory kind, got {to!r}. Write to='pinned_host'."
            )
        object.__setattr__(self, "to", to)

    def __repr__(self) -> str:
        return f"Offload({listed(self.names)}, to={self.to!r})"


@dataclasses.dataclass(frozen=True, repr=False)
class Rules(Rule):
    """Rules joined with `|`.

    Attributes:
        rules: The single rules, in the order in which they were written.
    """

    rules: tuple[Rule, ...]

    def __post_init__(self) -> None:
        """Raise if two rules contradict each other."""
        self._check(SavePrimitives, RecomputePrimitives, "saved and recomputed")
        self._check(Save, Offload, "saved on the device and offloaded")
        kinds = {rule.to for rule in self.rules if isinstance(rule, Offload)}
        if len(kinds) > 1:
            raise ValueError(
                "jrc.Offload: to must be the same in all rules that are joined, got "
                f"{listed(sorted(kinds))}. Choose one memory kind for all."
            )

    @property
    def parts(self) -> tuple[Rule, ...]:
        """The single rules."""
        return self.rules

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.rules))

    def _check(self, one: type, other: type, what: str) -> None:
        both = names_in(self, one) & names_in(self, other)
        if both:
            raise ValueError(
                f"jrc.{one.__name__} | jrc.{other.__name__}: a name must stand in one of the two, "
                f"got {listed(sorted(both))} in both, to be {what} at once. Remove it from one."
            )


def names_in(keep: Rule | None, kind: type) -> frozenset[str]:
    """Return all names in rules of this kind."""
    parts = () if keep is None else keep.parts
    return frozenset(name for rule in parts if isinstance(rule, kind) for name in rule.names)


def check_keep(keep: object) -> None:
    """Raise if `keep` is no rule."""
    known = Save | SavePrimitives | RecomputePrimitives | Offload
    parts = keep.parts if isinstance(keep, Rule) else ()
    if keep is not None and not (parts and all(isinstance(rule, known) for rule in parts)):
        raise TypeError(
            f"keep must be a rule or None, got {type(keep).__name__} {keep!r}. Write a rule "
            "such as jrc.Save('h') | jrc.SavePrimitives('dot_general')."
        )


def _checked(what: str, names: Iterable[object]) -> tuple[str, ...]:
    checked: list[str] = []
    for name in names:
        if not isinstance(name, str) or not name:
            raise TypeError(
                f"names must be strings, each naming a {what}, got {name!r}. "
                f"Write {running_name()}('name', 'other')."
            )
        checked.append(name)
    if not checked:
        raise ValueError(
            f"names must contain at least one {what}, got none. Write {running_name()}('name')."
        )
    return tuple(checked)
