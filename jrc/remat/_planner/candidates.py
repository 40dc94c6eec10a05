"""The row of plans for a function, from the leanest to nothing re-run."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from jrc._jaxpr import Program, evaluate, flops, label, loop_parts, nbytes, place, repeats
from jrc._tree import is_traced
from jrc._validate import check_flag
from jrc.remat._gradient.arguments import Arguments, arguments_of, call_checked
from jrc.remat._gradient.compiled_memory import bytes_on_device
from jrc.remat._planner.decision import Decision
from jrc.remat._planner.derivative_reads import residuals_of
from jrc.remat._planner.execute import inlined_program
from jrc.remat._planner.plan import Estimate, Kept, Plan
from jrc.remat._planner.search import (
    Candidate,
    candidate_plans,
    should_try_plain_first,
    widest_equation,
)
from jrc.remat._planner.signature import Signature, signature_of, traced_for_plan


@dataclasses.dataclass(frozen=True)
class Candidates:
    """The row of plans for a function, with what the search needs to know.

    Attributes:
        rungs: The plans, the leanest first, nothing re-run last.
        signature: Of the function's program.
        given: Bytes of arguments on one device.
        returned: Bytes of results: the function's and the gradients, which lie as arguments do.
        flops: Operations of the gradient program with nothing re-run.
        widest: The equation that needs most at once, for a person.
        program: The function's program.
        arguments: The arguments, or their shapes, and which leaves are differentiated.
        has_aux: Whether the function returns more than a loss.
        fn: The function.
        compilations: How many rungs a search may ask.
        plain_first: Whether nothing re-run is asked before all else.
    """

    ordered: tuple[Candidate, ...]
    signature: Signature
    given: int
    returned: int
    flops: int
    widest_equation: str
    program: Program
    arguments: Arguments
    has_aux: bool
    fn: Callable[..., Any]
    compilations: int
    plain_first: bool

    @classmethod
    def of(
        cls,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        argnums: int | Sequence[int],
        has_aux: bool,
        who: str,
        compilations: int = 5,
    ) -> "Candidates":
        """Trace the function, and weigh all that it makes."""
        check_flag(has_aux, "has_aux", who)
        arguments = arguments_of(fn, args, argnums, who, numbers=True)
        traced = traced_for_plan(_checked(fn, arguments, has_aux), args, {}, who)
        program = traced.program
        # What a function closes over comes first.
        at = [traced.closed + arguments.arrays.index(i) for i in arguments.perturbed]
        perturbed = [program.jaxpr.invars[i] for i in at]
        run = evaluate(program.jaxpr.replace(outvars=program.jaxpr.outvars[:1]))
        residuals = residuals_of(run, [v.aval for v in program.jaxpr.invars], at)
        kept, unfusable_bytes = residuals.bytes, residuals.unfusable_bytes
        graph, ordered = candidate_plans(program, perturbed, kept, unfusable_bytes, compilations)
        sizes = dict(zip(program.jaxpr.invars, map(bytes_on_device, traced.inputs), strict=True))
        results = sum(nbytes(x.aval) for x in program.jaxpr.outvars)
        most = widest_equation(program, graph)
        return cls(
            ordered=tuple(ordered),
            signature=signature_of(program, traced.closed),
            given=sum(sizes.values()),
            returned=results + sum(sizes[v] for v in perturbed),
            flops=flops(arguments.traced(fn, has_aux)),
            widest_equation="nothing" if most is None else program.name(most),
            program=program,
            arguments=arguments,
            has_aux=has_aux,
            fn=fn,
            compilations=compilations,
            plain_first=should_try_plain_first(ordered[0].temporaries, unfusable_bytes),
        )

    def applied(self, candidate: Candidate, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The function as this rung has it."""
        return fn if candidate.decision is None else self.plan_of(candidate, 0, None, 0).apply(fn)

    def predicted(self, candidate: Candidate) -> Estimate:
        """What the model says of a rung."""
        peak = self.given + self.returned + candidate.temporaries
        total = self.flops + candidate.recomputed
        return Estimate(peak, total, total / max(self.flops, 1))

    def counted(self, candidate: Candidate) -> int:
        """Operations of the gradient program with this rung's plan."""
        if candidate.decision is None:
            return self.flops
        return flops(self.arguments.traced(self.applied(candidate, self.fn), self.has_aux))

    def lowered(self, candidate: Candidate) -> jax.stages.Lowered:
        """The gradient program with this rung's plan."""
        return self.arguments.lowered(self.applied(candidate, self.fn), self.has_aux)

    def plan_of(
        self,
        candidate: Candidate,
        budget: int,
        peak: int | None,
        compilations: int,
        counted: int | None = None,
    ) -> Plan:
        """The rung as a plan; with the peak of its compiled program, if there is one.

        `counted` are its operations, where they were counted before.
        """
        verified = None
        if peak is not None:
            total = self.counted(candidate) if counted is None else counted
            verified = Estimate(peak, total, total / max(self.flops, 1))
        return Plan(
            budget=budget,
            predicted=self.predicted(candidate),
            verified=verified,
            unplanned_flops=self.flops,
            saved_bytes=candidate.saved,
            compilations=compilations,
            kept=tuple(_kept(self.program, candidate.decision)) if candidate.decision else (),
            decision=candidate.decision,
            signature=self.signature,
        )


def _checked(fn: Callable[..., Any], arguments: Arguments, has_aux: bool) -> Callable[..., Any]:
    """The function, which complains if it does not return a loss."""

    @functools.wraps(fn)
    def checked(*args: Any) -> Any:
        out = call_checked(fn, args, {}, arguments.who)
        arguments.result(out, has_aux)
        loss = out[0] if has_aux else out
        if not is_traced(loss):
            raise TypeError(
                f"{arguments.who}: `{arguments.name}` returns its loss as an array of JAX; got "
                f"{type(loss).__name__}, which depends on nothing. Return jnp.asarray(loss)."
            )
        return out

    return checked


def _kept(program: Program, decision: Decision, times: int = 1) -> Iterable[Kept]:
    """What a choice keeps, equal values together, the largest first."""
    found: dict[str, tuple[int, int]] = {}
    for name, count, size in _each_kept(program, decision, times):
        n, total = found.get(name, (0, 0))
        found[name] = (n + count, total + size)
    kept = [Kept(name, n, size) for name, (n, size) in found.items()]
    return sorted(kept, key=lambda each: (-each.bytes, each.name))


def _each_kept(program: Program, decision: Decision, times: int) -> Iterable[tuple[str, int, int]]:
    for stage in decision.stages:
        for p, i in stage.saved:
            var = program.unmarked(program.eqns[program.steps[p]].outvars[i])
            name = label(program.eqns[max(program.producer[var], 0)])
            yield name, times, times * nbytes(var.aval)
        if stage.inside is not None:
            eqn = program.eqns[program.steps[stage.positions[0]]]
            (body,) = (inlined_program(jaxpr) for jaxpr in [eqn.params["jaxpr"]])
            if stage.inside.chunks:
                start, count = loop_parts(eqn)
                turns = times * stage.inside.chunks
                for var in body.jaxpr.invars[start : start + count]:
                    size = turns * nbytes(var.aval)
                    yield f"between chunks of the loop at {place(eqn)}", turns, size
            yield from _each_kept(body, stage.inside, times * repeats(eqn))
