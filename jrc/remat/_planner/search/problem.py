"""A planning problem: a function with its arguments, its program and its candidates."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from jrc._errors import named_like
from jrc._jaxpr import Opened, Program, evaluate, flops, nbytes
from jrc._tree import is_traced
from jrc._validate import check_flag
from jrc.remat._gradient.arguments import (
    Arguments,
    arguments_of,
    call_checked,
    refuse_tracers,
)
from jrc.remat._gradient.compiled_memory import bytes_on_device
from jrc.remat._gradient.opaque import Opaque, Path, opaque_equations
from jrc.remat._gradient.residuals import residuals_and_gradient
from jrc.remat._planner.costs.buffer_peak import peak_of_temporaries
from jrc.remat._planner.costs.host_link import HostLink
from jrc.remat._planner.costs.platform_memory import CPU, PlatformMemory, memory_on
from jrc.remat._planner.plan.decision import AS_WRITTEN
from jrc.remat._planner.plan.opaque_in_plan import opaque_under
from jrc.remat._planner.plan.plan import Plan, apply_decision
from jrc.remat._planner.plan.plan_candidates import Estimate, PlanCandidate
from jrc.remat._planner.plan.policy_by_names import by_name
from jrc.remat._planner.plan.saved_by_plan import change_text, saved_by
from jrc.remat._planner.program.signature import Signature, signature_of
from jrc.remat._planner.program.trace import inlined_program, traced_for_plan
from jrc.remat._planner.search.calibration import (
    Calibration,
    calibration_of,
    is_split,
    most_parts,
)
from jrc.remat._planner.search.candidates import Candidate, candidate_row
from jrc.remat._planner.search.compiled_cost import CompiledCost
from jrc.remat._planner.settings import SETTINGS
from jrc.remat._planner.solver.as_written import NAME as AS_WRITTEN_NAME
from jrc.remat._planner.solver.as_written import as_written_candidate


@dataclasses.dataclass(frozen=True)
class PlanningProblem:
    """A function whose gradient is to fit a budget, and the candidates for it.

    Attributes:
        candidates: The candidates, the leanest first, nothing recomputed last.
        by_hand: What a person would try by hand and the model finds dominated, the leanest first.
        plain_first: Whether nothing recomputed is compiled before all else.
        signature: Of the function's program.
        given: Bytes of arguments on one device.
        returned: Bytes of results: the function's and the gradients, which lie as arguments do.
        flops: FLOPs of the gradient program with nothing recomputed.
        widest: The equation whose differentiation needs most bytes, as a label.
        program: The function's program.
        arguments: The arguments, or their shapes, and which leaves are differentiated.
        has_aux: Whether the function returns more than a loss.
        fn: The function.
        compilations: How many candidates a search may compile.
        opened: The `jax.checkpoint` regions of the function that are opened.
        opaque: The equations that the planner cannot look into, each with its path.
        target: The name of the target that programs are compiled for; empty without one.
        is_split: Whether XLA splits the program over devices, so that predictions are calibrated.
        calibration: From the model's peak to that of one device, where the program is split.
        calibrated_by: How many programs were compiled for that alone.
        memory: What is assumed of the platform that programs are compiled for.
        followed: Of candidates whose gradient program was followed, the peak in bytes.
        most: At most so many programs are compiled, but for a wrong prediction; `None` sets no
            such bound.
        inside: Calls a function where the function may be traced: where the mesh axes that it names
            are known.
    """

    candidates: tuple[Candidate, ...]
    by_hand: tuple[Candidate, ...]
    plain_first: bool
    signature: Signature
    given: int
    returned: int
    flops: int
    widest: str
    program: Program
    arguments: Arguments
    has_aux: bool
    fn: Callable[..., Any]
    compilations: int
    opened: Opened
    opaque: tuple[tuple[Path, Opaque], ...]
    target: str = ""
    is_split: bool = False
    calibration: Calibration = Calibration()
    calibrated_by: int = 0
    memory: PlatformMemory = CPU
    followed: dict[Candidate, int] = dataclasses.field(default_factory=dict)
    most: int | None = None
    inside: Callable[[Callable[[], Any]], Any] = lambda find: find()

    @classmethod
    def of(
        cls,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        argnums: int | Sequence[int],
        has_aux: bool,
        who: str,
        compilations: int = SETTINGS.compilations,
        respect_checkpoints: bool = False,
        target: str = "",
        platform: str | None = None,
        most: int | None = None,
        link: HostLink | None = None,
        split: bool | None = None,
        inside: Callable[[Callable[[], Any]], Any] | None = None,
    ) -> "PlanningProblem":
        """Trace a function, and find its candidates.

        What the arguments mean is said at `jrc.plan` and the attributes. `split` is whether XLA
        splits the program over devices; by default, whether it splits the arguments.
        """
        check_flag(has_aux, "has_aux", who)
        check_flag(respect_checkpoints, "respect_checkpoints", who)
        arguments = arguments_of(fn, args, argnums, who, numbers=True)
        checked = _checked(fn, arguments, has_aux)
        traced = traced_for_plan(checked, args, {}, who, respect_checkpoints)
        if inside is None:
            refuse_tracers(traced.inputs[: traced.closed], who, closed_by=arguments.name)
        program = traced.program
        # What a function closes over comes first among the inputs of its program.
        at = [traced.closed + arguments.arrays.index(i) for i in arguments.perturbed]
        perturbed = [program.jaxpr.invars[i] for i in at]
        plain = traced.opened.jaxpr
        avals = [v.aval for v in plain.invars]
        residuals, gradient = residuals_and_gradient(evaluate(plain), avals, at)
        memory = memory_on(platform or arguments.platform)
        split = is_split(arguments.leaves) if split is None else split
        if not split and (target or most is not None):
            # Predictions choose: the row is as long as where more is compiled.
            halvings = max(compilations, SETTINGS.compilations)
        else:
            halvings = compilations
        row = candidate_row(program, perturbed, residuals, halvings, memory, link)
        signature = signature_of(traced, respect_checkpoints)
        plain_flops = flops(gradient)
        by_hand = row.by_hand
        if traced.regions:
            by_hand = (*by_hand, as_written_candidate(traced.written, at, plain_flops))
        sizes = dict(zip(program.jaxpr.invars, map(bytes_on_device, traced.inputs), strict=True))
        # XLA counts closed-over arrays as constants of the program, and not as its arguments.
        given = sum(sizes[v] for v in program.jaxpr.invars[traced.closed :])
        results = sum(nbytes(x.aval) for x in program.jaxpr.outvars)
        problem = cls(
            candidates=row.candidates,
            by_hand=tuple(sorted(by_hand, key=lambda each: (each.temporaries, each.cost))),
            plain_first=row.plain_first,
            signature=signature,
            given=given,
            returned=results + sum(sizes[v] for v in perturbed),
            flops=plain_flops,
            widest="nothing" if row.widest is None else program.name(row.widest),
            program=program,
            arguments=arguments,
            has_aux=has_aux,
            fn=fn,
            compilations=compilations,
            opened=traced.opened,
            opaque=opaque_equations(
                program, perturbed, program.jaxpr.outvars[:1], regions=True, inlined=inlined_program
            ),
            target=target,
            memory=memory,
            most=most,
            inside=inside or (lambda find: find()),
            is_split=split,
        )
        problem.follow(row.candidates[-1], gradient)
        return problem

    @property
    def regions(self) -> int:
        """How many `jax.checkpoint` regions are opened."""
        return self.opened.count

    @property
    def all(self) -> tuple[Candidate, ...]:
        """The candidates, and behind them those by hand."""
        return (*self.candidates, *self.by_hand)

    @property
    def is_led_by_predictions(self) -> bool:
        """Whether predictions choose what is compiled: they are good, and compilations are few.

        Of a program on several devices no prediction is good before some candidates are compiled.
        """
        return self.most is not None and not self.is_split

    @property
    def leanest(self) -> tuple[int, ...]:
        """Those that may need least, by number in `all`, the least modelled peak first.

        The leanest candidates, and the leanest ways by hand: where the model is wrong, these need
        less.
        """
        count = len(self.candidates)
        by_hand = min(SETTINGS.by_hand_compiled, len(self.by_hand))
        few = (*range(min(SETTINGS.leanest_compiled, count)), *range(count, count + by_hand))
        return tuple(sorted(few, key=lambda i: self.all[i].temporaries))

    def cost_order(self, i: int) -> tuple[int, int]:
        """Return what orders the candidates: time in FLOPs, then predicted bytes."""
        return self.all[i].cost, self.all[i].temporaries

    def applied(self, candidate: Candidate, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function under a candidate's decision."""
        if candidate.decision is None and not self.regions:
            return fn
        return apply_decision(fn, candidate.decision, self.signature)

    def predicted(
        self, candidate: Candidate, followed: Iterable[Candidate] | None = None
    ) -> Estimate:
        """Return the cost of a candidate as the model has it.

        Args:
            candidate: The candidate.
            followed: Candidates whose peak is predicted from their own gradient program; nothing
                recomputed always is. The others lie on the lines through those of the row. By
                default `few`.
        """
        followed = {*(self.few if followed is None else followed), self.candidates[-1]}
        if self.is_split:
            peak = self._on_one_device(candidate)
        elif candidate in followed:
            peak = self.follow(candidate)
        else:
            # What the host has tells nothing of candidates that move nothing there.
            alike = [
                each for each in self.candidates[:-1] if bool(each.host) == bool(candidate.host)
            ]
            known = [each for each in alike if each in followed]
            pairs = ((self._modelled(each), self.follow(each)) for each in known)
            peak = calibration_of(pairs).of(self._modelled(candidate))
        return self._estimate(peak, self.flops + candidate.recomputed, candidate.host)

    def follow(self, candidate: Candidate, gradient: Any = None) -> int:
        """Return the peak of a candidate, from the lifetimes of its gradient program's values.

        Args:
            candidate: The candidate.
            gradient: Its gradient program, where it is traced already.
        """
        if candidate not in self.followed:
            if gradient is None:
                gradient = self._gradient(candidate)
            temporaries = peak_of_temporaries(gradient, self.memory)
            self.followed[candidate] = self.given + self.returned + temporaries
        return self.followed[candidate]

    def follow_all(self, candidates: Iterable[Candidate]) -> None:
        """Follow each candidate that was not, where the function may be traced."""
        if new := [each for each in candidates if each not in self.followed]:
            self.inside(lambda: [self.follow(each) for each in new])

    def _gradient(self, candidate: Candidate) -> Any:
        return self.arguments.traced(self.applied(candidate, self.fn), self.has_aux)

    @property
    def few(self) -> tuple[Candidate, ...]:
        """The candidates that are followed where none is compiled: the leanest and a middle one.

        In a large program, whose trace takes seconds, the leanest alone. With `offload` both also
        of those that move nothing.
        """
        is_large = len(self.program.steps) > SETTINGS.followed_equations
        kinds = [[each for each in self.candidates if bool(each.host) == moves] for moves in (0, 1)]
        both = [(some[0], some[0 if is_large else len(some) // 2]) for some in kinds if some]
        return tuple(dict.fromkeys(itertools.chain(*both)))

    def _modelled(self, candidate: Candidate) -> int:
        return self.given + self.returned + candidate.temporaries

    def _on_one_device(self, candidate: Candidate) -> int:
        modelled = self._modelled(candidate)
        if self.calibration.points:
            return self.calibration.of(modelled)
        own = self.given + self.returned
        parts = most_parts(self.arguments.of(self.arguments.arrays))
        return own + (self.followed.get(candidate, modelled) - own) // parts

    def calibrated(self, peaks: Mapping[Candidate, int]) -> "PlanningProblem":
        """Return the problem with predictions on the lines through compiled candidates.

        Args:
            peaks: Of the candidates that were compiled, the peak of one device in bytes.
        """
        pairs = [(self._modelled(each), peaks[each]) for each in self.candidates if each in peaks]
        return dataclasses.replace(self, calibration=calibration_of(pairs))

    def counted(self, candidate: Candidate) -> int:
        """Return the FLOPs of the gradient program under a candidate's decision."""
        if candidate.decision is None:
            return self.flops
        return self.inside(lambda: flops(self._gradient(candidate)))

    def lowered(self, candidate: Candidate) -> jax.stages.Lowered:
        """Return the gradient program under a candidate's decision, lowered.

        Its peak is then predicted from that program.
        """
        staged = self.arguments.staged(self.applied(candidate, self.fn), self.has_aux)
        self.follow(candidate, staged.jaxpr)
        return staged.lower()

    def plan_of(
        self,
        candidate: Candidate,
        budget: int,
        memory: Mapping[int, CompiledCost],
    ) -> Plan:
        """Return a candidate as a plan.

        Args:
            candidate: The candidate.
            budget: Bytes that were asked for.
            memory: Of the candidates that were compiled, by number in `all`, the compiled cost.
        """
        i = self.all.index(candidate)
        verified = None
        if i in memory:
            verified = self._estimate(memory[i].peak, self.counted(candidate), memory[i].host)
        followed = [self.all[k] for k in memory] or self.few
        decision = candidate.decision
        opaque = opaque_under(decision, self.opaque)
        return Plan(
            budget=budget,
            predicted=self.predicted(candidate, followed),
            verified=verified,
            unplanned_flops=self.flops,
            saved_bytes=candidate.saved,
            compilations=self.calibrated_by + len(memory),
            kept=saved_by(self.program, decision) if decision else (),
            candidates=self._weighed(i, memory, followed),
            decision=decision,
            signature=self.signature,
            opaque=opaque,
            by_name=by_name(self.program, decision, self.opened, opaque),
            target=self.target,
        )

    def _weighed(
        self, chosen: int, memory: Mapping[int, CompiledCost], followed: Sequence[Candidate]
    ) -> tuple[PlanCandidate, ...]:
        """Every candidate with its cost, and what changes from the one before it."""
        found, before = [], None
        for i, candidate in enumerate(self.all):
            decision = candidate.decision
            saved = saved_by(self.program, decision) if decision else None
            if i >= len(self.candidates):
                before = None
            found.append(
                PlanCandidate(
                    predicted=self.predicted(candidate, followed),
                    compiled_peak_bytes=memory[i].peak if i in memory else None,
                    compiled_host_bytes=memory[i].host if i in memory else None,
                    sent_bytes=memory[i].sent if i in memory else None,
                    rerun_sent_bytes=memory[i].rerun_sent if i in memory else None,
                    saved_bytes=candidate.saved,
                    change=AS_WRITTEN_NAME
                    if decision == AS_WRITTEN
                    else change_text(before, saved),
                    is_chosen=i == chosen,
                    name=candidate.name,
                )
            )
            before = saved
        return tuple(found)

    def _estimate(self, peak: int, total: int, host: int) -> Estimate:
        return Estimate(peak, total, total / self.flops if self.flops else 1.0, host)


def _checked(fn: Callable[..., Any], arguments: Arguments, has_aux: bool) -> Callable[..., Any]:
    """The function, which raises if it does not return a loss."""

    @named_like(fn)
    def checked(*args: Any) -> Any:
        out = call_checked(fn, args, {}, arguments.who)
        arguments.result(out, has_aux)
        loss = out[0] if has_aux else out
        if not is_traced(loss):
            raise TypeError(
                f"{arguments.who}: `{arguments.name}` must return its loss as a JAX array, got "
                f"{type(loss).__name__}, which depends on nothing. Return jnp.asarray(loss)."
            )
        return out

    return checked
