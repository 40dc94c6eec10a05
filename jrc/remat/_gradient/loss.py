"""A scalar function whose gradient is looked at: what moves and what does not, as flat lists.

>>> import jax.numpy as jnp
>>> loss = loss_of(lambda w, n: jnp.sum(w["a"]) * n, ({"a": jnp.ones(3)}, 2), 0, False, "here")
>>> loss.moving, len(loss.rest), loss.value(loss.moving, loss.rest)[0].shape
([Array([1., 1., 1.], dtype=float32)], 0, ())
"""

import dataclasses
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import jax

from jrc._jaxpr import INPUT, Program, evaluate, inner_programs
from jrc._jaxpr import trace as trace_program
from jrc.remat._gradient.arguments import arguments_of, call_checked

_MARK_SCOPE = "jrc_mark_"
_COMPILING = threading.Lock()


@dataclasses.dataclass(frozen=True, eq=False)
class Loss:
    """A traced scalar function of two lists of arrays.

    Attributes:
        program: The function as a program, whose inputs are constants, `moving` and `rest`.
        constants: What the function closes over.
        moving: What it is differentiated with respect to; arrays or shapes.
        rest: Its other arrays.
        name: What the user calls it.
    """

    program: Program
    constants: tuple[Any, ...]
    perturbed: list[Any]
    rest: list[Any]
    name: str

    def value(self, perturbed: Sequence[Any], rest: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The scalar, and whatever else the function returns."""
        return self._split(evaluate(self.program.jaxpr), perturbed, rest)

    def marked_value(self, perturbed: Sequence[Any], rest: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The same; what makes a marked value runs under a name scope that says so."""
        return self._split(self._under_marks, perturbed, rest)

    def pullback(self, perturbed: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
        """What the derivative keeps."""
        _, pull, _ = jax.vjp(lambda *xs: self.value(xs, rest), *perturbed, has_aux=True)
        return jax.tree.leaves(pull)

    def gradient(self, perturbed: Sequence[Any], rest: Sequence[Any]) -> Any:
        """Value and gradients."""
        return jax.value_and_grad(self.value, has_aux=True)(list(perturbed), rest)

    def compiled(self) -> Any:
        """The compiled program of value and gradients."""

        def gradient(perturbed: Sequence[Any], rest: Sequence[Any]) -> Any:
            return jax.value_and_grad(self.marked_value, has_aux=True)(list(perturbed), rest)

        lowered = jax.jit(gradient).lower(self.perturbed, self.rest)
        with _names_in_cache_keys():
            return lowered.compile()

    def _split(
        self, run: Callable[..., Any], perturbed: Sequence[Any], rest: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        value, *more = run(*self.constants, *perturbed, *rest)
        return value, more

    def marks_in(self, path: str) -> list[tuple[str, bool]]:
        """The marks of what an operator of the compiled program makes, from its path.

        With each, whether it is made by many operators (a region, a call), of which the last
        makes the value.
        """
        found = (int(p) for p in re.findall(rf"{_MARK_SCOPE}(\d+)_", path))
        return [(self._marks[p], bool(inner_programs(self.program.eqns[p]))) for p in found]

    @cached_property
    def _marks(self) -> Mapping[int, str]:
        """The mark of each equation that makes a marked value, by the equation's position."""
        names = self.program.names.items()
        found = {self.program.producer[var]: name for var, name in names}
        return {p: name for p, name in found.items() if p != INPUT and self._live[p]}

    @cached_property
    def _live(self) -> tuple[bool, ...]:
        return self.program.live()

    def _under_marks(self, *inputs: Any) -> list[Any]:
        program = self.program
        values = dict(zip(program.jaxpr.invars, inputs, strict=True))
        start = 0
        for end in [*sorted(self._marks), len(program.eqns)]:
            # What nothing depends on is left out: the rest does not hand values on to it.
            live = [p for p in range(start, end) if self._live[p]]
            self._run(live, nullcontext(), values)
            if end in self._marks:
                # A number, because a mark may hold what parts the names of scopes.
                self._run([end], jax.named_scope(f"{_MARK_SCOPE}{end}_"), values)
            start = end + 1
        return program.results(values)

    def _run(
        self, positions: Sequence[int], scope: AbstractContextManager[Any], values: dict[Any, Any]
    ) -> None:
        part = self.program.cut(positions)
        with scope:
            results = evaluate(part)(*(values[var] for var in part.invars))
        values |= dict(zip(part.outvars, results, strict=True))


def loss_of(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    argnums: int | Sequence[int],
    has_aux: bool,
    who: str,
) -> Loss:
    """Trace a function; errors speak for `who`. Nothing is run.

    Of the arguments `argnums` every floating leaf moves. JAX arrays, shapes and NumPy's arrays are
    inputs of the program; all else stays what it is.
    """
    apart = arguments_of(fn, args, argnums, who)
    perturbed = apart.of(apart.perturbed)
    others = [i for i in apart.arrays if i not in apart.perturbed]
    order = [*apart.perturbed, *others]

    def flat(*arrays: Any) -> list[Any]:
        out = call_checked(fn, apart.filled(arrays, order), {}, who)
        value, more = apart.result(out, has_aux)
        return [value, *more]

    rest = apart.of(others)
    traced = trace_program(flat, (*perturbed, *rest), {})
    constants = traced.inputs[: len(traced.inputs) - len(order)]
    return Loss(traced.program, constants, perturbed, rest, apart.name)


@contextmanager
def _names_in_cache_keys() -> Iterator[None]:
    """Compile programs apart that differ in their name scopes alone.

    JAX's cache of compiled programs (`jax_compilation_cache_dir`) takes them for one, and would
    hand out another function's marks. The option is that of the whole process: threads take turns,
    so that each finds the user's own value and puts it back.
    """
    option = "jax_compilation_cache_include_metadata_in_key"
    with _COMPILING:
        before = getattr(jax.config, option)
        jax.config.update(option, True)
        try:
            yield
        finally:
            jax.config.update(option, before)
