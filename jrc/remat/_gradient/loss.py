"""A traced loss function of two flat lists of arrays: perturbed ones, and the others.

>>> import jax.numpy as jnp
>>> loss = loss_of(lambda w, n: jnp.sum(w["a"]) * n, ({"a": jnp.ones(3)}, 2), 0, False)
>>> loss.perturbed, len(loss.rest), loss.value(loss.perturbed, loss.rest)[0].shape
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

from jrc._jaxpr import INPUT, Program, evaluate, inner_programs, nbytes
from jrc._jaxpr import trace as trace_program
from jrc.remat._gradient.arguments import arguments_of, call_checked, refuse_tracers
from jrc.remat._gradient.compiled_memory import bytes_on_device, compiled_to_look_at, device_of
from jrc.remat._gradient.residuals import saved_by

_MARK_SCOPE = "jrc_mark_"
_COMPILING = threading.Lock()


@dataclasses.dataclass(frozen=True, eq=False)
class Loss:
    """A traced scalar function of two lists of arrays.

    Attributes:
        program: The function's program; its inputs are `constants`, `perturbed` and `rest`.
        constants: The arrays that the function closes over.
        perturbed: The arrays or shapes that it is differentiated with respect to.
        rest: Its other arrays or shapes.
        name: The function's name.
    """

    program: Program
    constants: tuple[Any, ...]
    perturbed: list[Any]
    rest: list[Any]
    name: str

    def value(self, perturbed: Sequence[Any], rest: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Return the scalar, and the leaves of the auxiliary result."""
        return self._split(evaluate(self.program.jaxpr), perturbed, rest)

    def marked_value(self, perturbed: Sequence[Any], rest: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Return the same; the equation that makes a marked value has a name scope of its own."""
        return self._split(self._under_marks, perturbed, rest)

    def residuals(self, perturbed: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
        """Return the residuals: the values that the derivative saves."""
        _, vjp, _ = jax.vjp(lambda *xs: self.value(xs, rest), *perturbed, has_aux=True)
        return saved_by(vjp)

    def gradient(self, perturbed: Sequence[Any], rest: Sequence[Any]) -> Any:
        """Return value and gradients."""
        return jax.value_and_grad(self.value, has_aux=True)(list(perturbed), rest)

    @property
    def device(self) -> Any:
        """A device that the gradient is compiled for."""
        return device_of((*self.perturbed, *self.rest))

    @property
    def is_sharded(self) -> bool:
        """Whether `jit` shards an argument over several devices."""
        return any(
            bytes_on_device(x) < nbytes(jax.typeof(x)) for x in (*self.perturbed, *self.rest)
        )

    @cached_property
    def traced_gradient(self) -> jax.stages.Traced:
        """Value and gradients, traced."""
        return jax.jit(self.gradient).trace(self.perturbed, self.rest)

    def compiled(self) -> Any:
        """Compile value and gradients; what is returned is not meant to be run."""

        def gradient(perturbed: Sequence[Any], rest: Sequence[Any]) -> Any:
            return jax.value_and_grad(self.marked_value, has_aux=True)(list(perturbed), rest)

        if self._marks:
            lowered = jax.jit(gradient).lower(self.perturbed, self.rest)
        else:
            lowered = self.traced_gradient.lower()
        with _name_scopes_in_cache_key():
            return compiled_to_look_at(lowered, self.device.platform)

    def _split(
        self, run: Callable[..., Any], perturbed: Sequence[Any], rest: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        value, *more = run(*self.constants, *perturbed, *rest)
        return value, more

    def marks_in(self, path: str) -> list[tuple[str, bool]]:
        """Return the marks of the value that an instruction makes, from the instruction's path.

        With each, whether many instructions make it (those of a region or a call), the last of
        which makes the value.
        """
        found = (int(p) for p in re.findall(rf"{_MARK_SCOPE}(\d+)_", path))
        return [(self._marks[p], bool(inner_programs(self.program.eqns[p]))) for p in found]

    @cached_property
    def _marks(self) -> Mapping[int, str]:
        """The mark of each live equation that makes a marked value, by the equation's position."""
        names = self.program.names.items()
        found = {self.program.producer[var]: name for var, name in names}
        return {p: name for p, name in found.items() if p != INPUT and self._live[p]}

    @cached_property
    def _live(self) -> tuple[bool, ...]:
        return self.program.live()

    def _under_marks(self, *inputs: Any) -> list[Any]:
        """Run the program with a name scope around each equation that makes a marked value."""
        program = self.program
        values = dict(zip(program.jaxpr.invars, inputs, strict=True))
        start = 0
        for end in [*sorted(self._marks), len(program.eqns)]:
            # Dead equations are left out: live ones do not make the values that they read.
            live = [p for p in range(start, end) if self._live[p]]
            self._run(live, nullcontext(), values)
            if end in self._marks:
                # A number, because a mark may contain the separator of name scopes.
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
) -> Loss:
    """Trace a loss function; nothing is run, and Python calls `fn` once.

    JAX arrays, shapes and NumPy arrays are inputs of the program; other leaves are passed to the
    function as they are.

    Args:
        fn: The function.
        args: Its positional arguments.
        argnums: The arguments that are differentiated: every floating leaf of them.
        has_aux: Whether it returns a pair (loss, aux).

    Raises:
        TypeError: If an array that the function closes over is traced.
    """
    arguments = arguments_of(fn, args, argnums)
    perturbed = arguments.of(arguments.perturbed)
    others = [i for i in arguments.inputs if i not in arguments.perturbed]
    order = [*arguments.perturbed, *others]

    def flat(*arrays: Any) -> list[Any]:
        out = call_checked(fn, arguments.filled(arrays, order), {})
        value, more = arguments.result(out, has_aux)
        return [value, *more]

    rest = arguments.of(others)
    traced = trace_program(flat, (*perturbed, *rest), {})
    constants = traced.inputs[: len(traced.inputs) - len(order)]
    refuse_tracers(constants, closed_by=arguments.name)
    return Loss(traced.program, constants, perturbed, rest, arguments.name)


@contextmanager
def _name_scopes_in_cache_key() -> Iterator[None]:
    """Make JAX's compilation cache tell programs apart that differ in their name scopes alone.

    Such programs share a key in the cache (`jax_compilation_cache_dir`), so that one would be
    returned with the marks of the other. The option belongs to the whole process: a lock makes
    each thread read the user's value and restore it.
    """
    option = "jax_compilation_cache_include_metadata_in_key"
    with _COMPILING:
        before = getattr(jax.config, option)
        jax.config.update(option, True)
        try:
            yield
        finally:
            jax.config.update(option, before)
