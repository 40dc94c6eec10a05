"""One thing that makes a peak smaller, with what it is expected to cost or costs compiled."""

import dataclasses

from jrc._text import memory_text, seconds_text


@dataclasses.dataclass(frozen=True)
class Remedy:
    """What makes the peak of a program smaller; prints as a sentence.

    Attributes:
        text: What to do.
        kind: `"plan"` (`jrc.plan` of the function), `"chunks"` (one array is most of the peak),
            `"donate"`, `"cast"` (values are saved in float32), `"shard"` (arguments and results
            are most of it), `"loss"` (plan the loss of a step) or `"constants"`.
        peak_before: Bytes of the peak without it.
        bytes: How much smaller the peak is: compiled, or else at most.
        seconds: Of the compiled program with it, as in `Report.time`; `None` if unknown.
        seconds_ratio: The same over those without it. It is 1 where a remedy that was not compiled
            adds no work.
        is_compiled: Whether a program with it was compiled, so that its bytes are XLA's.
    """

    text: str
    kind: str
    peak_before: int
    bytes: int
    seconds: float | None = None
    seconds_ratio: float | None = None
    is_compiled: bool = False

    @property
    def peak_bytes(self) -> int | None:
        """Bytes of the peak with it: compiled, or else at least; `None` for a plan of a loss."""
        return None if self.kind == "loss" else self.peak_before - self.bytes

    def __str__(self) -> str:
        """Return what to do, the bytes, and the seconds if they are known."""
        before = memory_text(self.peak_before)
        if not self.is_compiled:
            is_known = self.bytes and self.peak_bytes is not None
            figures = f" ({memory_text(self.bytes)} of a peak of {before})" if is_known else ""
            return f"{self.text}{figures}"
        ratio = self.seconds_ratio
        time = f", {ratio:.3f} x the seconds" if ratio else ""
        time += f" ({seconds_text(self.seconds)})" if ratio and self.seconds else ""
        after = memory_text(self.peak_before - self.bytes)
        return f"{self.text}: peak {after} of {before}{time}, compiled"


def donation_text(argnums: tuple[int, ...]) -> str:
    """Return what to write so that results lie in the memory of arguments."""
    which = f"({', '.join(map(str, argnums))}{',' * (len(argnums) == 1)})" if argnums else "..."
    return (
        "results could lie in the memory of arguments of the same type: jax.jit(fn, "
        f"donate_argnums={which})"
    )
