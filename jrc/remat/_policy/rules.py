"""Rules for what is kept and what is re-run: small values that combine with `|`."""

import dataclasses
from collections.abc import Iterable

from jrc._errors import listed


class Rule:
    """One rule, or several joined with `|`; frozen, hashable, and prints as it is written."""

    def __or__(self, other: "Rule") -> "Rules":
        """Both rules at once."""
        if not isinstance(other, Rule):
            return NotImplemented
        return Rules((*self.parts, *other.parts))

    @property
    def parts(self) -> tuple["Rule", ...]:
        """The single rules that this one is made of."""
        return (self,)


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Save(Rule):
    """Keeps the values with these marks; all else is re-run.

    A value is held as it is. An operator that is differentiated from its own result (`tanh`,
    `exp`, `sigmoid`, `relu`) then needs nothing before it; one that reads its argument (`gelu`,
    `sin`) has that made again: keep the argument, or call the operator through `jrc.keep_op`.

    Attributes:
        names: Marks, as given to `jrc.mark` or `jax.ad_checkpoint.checkpoint_name`.
    """

    names: tuple[str, ...]

    def __init__(self, *names: str):
        object.__setattr__(self, "names", _checked("jrc.Save", "mark", names))

    def __repr__(self) -> str:
        return f"Save({listed(self.names)})"


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class SavePrimitives(Rule):
    """Keeps every result of these operators; all else is re-run.

    Attributes:
        names: Primitives as a program prints them (`dot_general`, `tanh`), or names of functions
            that are a call in the program (`gelu`, `relu`, `softmax`).
    """

    names: tuple[str, ...]

    def __init__(self, *names: str):
        object.__setattr__(self, "names", _checked("jrc.SavePrimitives", "primitive", names))

    def __repr__(self) -> str:
        return f"SavePrimitives({listed(self.names)})"


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class RecomputePrimitives(Rule):
    """Re-runs every result of these operators; alone, it leaves all else as JAX keeps it.

    Attributes:
        names: As for `SavePrimitives`.
    """

    names: tuple[str, ...]

    def __init__(self, *names: str):
        object.__setattr__(self, "names", _checked("jrc.RecomputePrimitives", "primitive", names))

    def __repr__(self) -> str:
        return f"RecomputePrimitives({listed(self.names)})"


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Offload(Rule):
    """Keeps the values with these marks in another memory; all else is re-run.

    Copies to and fro are XLA's, which overlaps them with computation. What the part after the
    last boundary reads stays on the device: the backward pass begins there.

    Attributes:
        names: Marks, as given to `jrc.mark`.
        to: The memory kind, `"pinned_host"` by default.
    """

    names: tuple[str, ...]
    to: str

    def __init__(self, *names: str, to: str = "pinned_host"):
        object.__setattr__(self, "names", _checked("jrc.Offload", "mark", names))
        if not isinstance(to, str) or not to:
            raise TypeError(
                f"jrc.Offload: `to` is the name of a memory kind; got {to!r}. "
                "Write to='pinned_host'."
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
        """Refuse two rules that say the opposite of one value."""
        self._check(SavePrimitives, RecomputePrimitives, "kept and re-run")
        self._check(Save, Offload, "kept on the device and offloaded")
        places = {rule.to for rule in self.rules if isinstance(rule, Offload)}
        if len(places) > 1:
            raise ValueError(
                f"jrc.Offload: one set of rules offloads to one memory kind; got "
                f"{listed(sorted(places))}. Choose one `to` for all."
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
                f"jrc.{one.__name__} | jrc.{other.__name__}: {listed(sorted(both))} would be "
                f"{what} at once. Leave it out of one of the two."
            )


def names_in(keep: Rule | None, kind: type) -> frozenset[str]:
    """All names that rules of this kind carry."""
    parts = () if keep is None else keep.parts
    return frozenset(name for rule in parts if isinstance(rule, kind) for name in rule.names)


def check_keep(keep: object, who: str) -> None:
    """Refuse what is no rule."""
    known = Save | SavePrimitives | RecomputePrimitives | Offload
    parts = keep.parts if isinstance(keep, Rule) else ()
    if keep is not None and not (parts and all(isinstance(rule, known) for rule in parts)):
        raise TypeError(
            f"{who}: keep is a rule such as jrc.Save('h') | jrc.SavePrimitives('dot_general'); "
            f"got {type(keep).__name__} {keep!r}."
        )


def _checked(who: str, what: str, names: Iterable[object]) -> tuple[str, ...]:
    checked: list[str] = []
    for name in names:
        if not isinstance(name, str) or not name:
            raise TypeError(
                f"{who}: a {what} is given by its name, a string; got {name!r}. "
                f"Write {who}('name', 'other')."
            )
        checked.append(name)
    if not checked:
        raise ValueError(f"{who}: at least one {what} is named; got none. Write {who}('name').")
    return tuple(checked)
