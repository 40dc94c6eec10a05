"""Finding a plan: a row of candidates, of which compiled programs show the one that fits."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jrc._errors import name_of
from jrc._jaxpr import Program, Traced, evaluate, label, nbytes, place, repeats
from jrc._tree import is_floating, split
from jrc.remat._budget import BudgetError, checked_budget, text_of
from jrc.remat._keep import check_flag
from jrc.remat._memory import Memory, memory_needed
from jrc.remat._plan import Estimate, Kept, Plan
from jrc.remat._planning.choice import Choice
from jrc.remat._planning.graph import residual_bytes
from jrc.remat._planning.ladder import (
    Rung,
    asks_plain_first,
    highest_that_fits,
    ladder_of,
    live_flops,
    widest,
)
from jrc.remat._planning.program import Signature, as_array, signature_of, traced_for_plan
from jrc.remat._planning.run import opened


def plan(
    fn: Callable[..., Any],
    *args: Any,
    budget: int | str | float,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    verify: bool = True,
    compilations: int = 5,
) -> Plan:
    """The cheapest recomputation whose compiled gradient program fits a budget.

    The function is traced once. For every intermediate value the planner weighs keeping it against
    making it again, in FLOPs and in bytes at each position of the backward pass: what is kept so
    far, what is made again there, cotangents. It works inside of loops and `shard_map` too, and
    cuts loops into chunks where that pays. The result is a fixed row of plans from the leanest to
    nothing re-run; the budget picks one of them by compiling a few. Nothing is run.

    The peak is that of `jax.jit(jax.value_and_grad(fn, argnums, has_aux))` as XLA states it for
    one device: arguments + outputs + temporaries - aliased.

    Args:
        fn: A pure JAX-traceable function of pytrees that returns a scalar loss first.
        *args: Its arguments: arrays, numbers, or `jax.ShapeDtypeStruct`s.
        budget: Bytes (`int`), text (`"1.5GiB"`, `"800MB"`), or a fraction (`float` in [0, 1])
            between the least peak that is reached (0) and that with nothing re-run (1). A fraction
            costs two more compilations, for the two ends.
        argnums: The arguments that are differentiated.
        has_aux: Whether `fn` returns `(loss, aux)`.
        verify: Whether programs are compiled. Without, the plan is the model's guess, which
            does not promise to fit.
        compilations: How many programs may be compiled; each more halves the steps of the row of
            plans. More budget never costs more FLOPs for one and the same number.

    Returns:
        The plan. The same inputs give the same plan on every host, and more budget never a plan
        with more FLOPs. With several processes all of them get that of process 0.

    Raises:
        TypeError: If `fn` is no function, its first result no floating scalar, or the budget
            neither a number nor text.
        ValueError: If the budget is no size, or `compilations` below 1.
        BudgetError: If no plan fits; it carries the least peak and the plan that reaches it.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def loss(w, x):
        ...     for _ in range(8):
        ...         x = jnp.tanh(x @ w)
        ...     return jnp.sum(x)
        >>> w, x = jnp.ones((16, 16)), jnp.ones((64, 16))
        >>> lean = jrc.plan(loss, w, x, budget=0.0)
        >>> free = jrc.plan(loss, w, x, budget=1.0)
        >>> lean.verified.peak_bytes < free.verified.peak_bytes, free.reruns
        (True, False)
        >>> grads = jax.jit(jax.grad(lean.apply(loss)))(w, x)

    Source: save-sets as in Jain et al., "Checkmate", arXiv 1910.02653; the peak at every backward
    position as in Beaumont et al., "Rockmate", ICML 2023.
    """
    who = "jrc.plan"
    budget = checked_budget(budget, who)
    check_flag(verify, "verify", who)
    _check_compilations(compilations, who)
    candidates = Candidates.of(fn, args, argnums, has_aux, who, compilations)

    def compiled(rung: Rung) -> Memory:
        program = jax.value_and_grad(candidates.applied(rung, fn), argnums, has_aux=has_aux)
        return memory_needed(jax.jit(program).lower(*args))

    return agreed(choose(candidates, budget, compiled if verify else None, who))


def plan_within(
    fn: Callable[..., Any],
    lower: Callable[[Callable[..., Any]], jax.stages.Lowered],
    budget: int | str | float,
    who: str,
) -> Plan:
    """The plan for a function inside of a larger program, whose whole peak is to fit.

    Args:
        fn: A function that the program differentiates by its first argument.
        lower: The program, lowered, with another function in the place of this one.
        budget: As for `plan`.
        who: The name under which errors speak.

    Returns:
        The plan; its FLOPs are those of the function's gradient.
    """
    limit = checked_budget(budget, who)
    found: list[Candidates] = []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        out = fn(*args, **kwargs)
        if not found:
            shapes = jax.tree.map(_shape_of, args)
            with_aux = isinstance(out, tuple | list)
            found.append(Candidates.of(fn, shapes, 0, with_aux, who, counts=False))
        return out

    lower(recorded)
    (candidates,) = found

    def compiled(rung: Rung) -> Memory:
        return memory_needed(lower(candidates.applied(rung, fn)))

    return agreed(choose(candidates, limit, compiled, who))


def _shape_of(leaf: Any) -> Any:
    traced = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if traced else leaf


@dataclasses.dataclass(frozen=True)
class Candidates:
    """The row of plans for a function, with what the search needs to know.

    Attributes:
        rungs: The plans, the leanest first, nothing re-run last.
        signature: Of the function's program.
        given: Bytes of arguments.
        returned: Bytes of results: the function's and the gradients.
        flops: Operations of the gradient program with nothing re-run.
        widest: The equation that needs most at once, for a person.
        program: The function's program.
        args: The arguments, or their shapes.
        argnums: Those that are differentiated.
        has_aux: Whether the function returns more than a loss.
        fn: The function.
        counts: Whether operations can be counted later, outside of where it was traced.
    """

    rungs: tuple[Rung, ...]
    signature: Signature
    given: int
    returned: int
    flops: int
    widest: str
    program: Program
    args: tuple[Any, ...]
    argnums: int | Sequence[int]
    has_aux: bool
    fn: Callable[..., Any]
    counts: bool

    @classmethod
    def of(
        cls,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        argnums: int | Sequence[int],
        has_aux: bool,
        who: str,
        compilations: int = 5,
        counts: bool = True,
    ) -> "Candidates":
        """Trace the function, and weigh all that it makes."""
        check_flag(has_aux, "has_aux", who)
        if not callable(fn):
            raise TypeError(f"{who}: the first argument is a function; got {type(fn).__name__}.")
        traced = traced_for_plan(fn, args, {})
        program = traced.program
        _check_loss(program, fn, who)
        moving = _moving(traced, args, argnums, who)
        at = [i for i, v in enumerate(program.jaxpr.invars) if v in moving]
        run = evaluate(program.jaxpr.replace(outvars=program.jaxpr.outvars[:1]))
        kept = residual_bytes(run, [v.aval for v in program.jaxpr.invars], at)
        graph, rungs = ladder_of(program, moving, kept, compilations)
        gradient = jax.make_jaxpr(jax.value_and_grad(fn, argnums, has_aux=has_aux))(*args)
        returned = [x.aval for x in program.jaxpr.outvars] + [v.aval for v in moving]
        most = widest(program, graph)
        return cls(
            rungs=tuple(rungs),
            signature=signature_of(program),
            given=sum(nbytes(v.aval) for v in program.jaxpr.invars),
            returned=sum(map(nbytes, returned)),
            flops=live_flops(gradient),
            widest="nothing" if most is None else program.name(most),
            program=program,
            args=args,
            argnums=argnums,
            has_aux=has_aux,
            fn=fn,
            counts=counts,
        )

    def applied(self, rung: Rung, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The function as this rung has it."""
        return fn if rung.choice is None else self.plan_of(rung, 0, None, 0).apply(fn)

    def predicted(self, rung: Rung) -> Estimate:
        """What the model says of a rung."""
        peak = self.given + self.returned + rung.temporaries
        total = self.flops + rung.again
        return Estimate(peak, total, total / max(self.flops, 1))

    def counted(self, rung: Rung) -> int:
        """Operations of the gradient program with this rung's plan."""
        if rung.choice is None:
            return self.flops
        applied = self.applied(rung, self.fn)
        program = jax.value_and_grad(applied, self.argnums, has_aux=self.has_aux)
        return live_flops(jax.make_jaxpr(program)(*self.args))

    def plan_of(self, rung: Rung, budget: int, peak: int | None, compilations: int) -> Plan:
        """The rung as a plan; with the peak of its compiled program, if there is one."""
        verified = None
        if peak is not None:
            total = self.counted(rung) if self.counts else self.flops + rung.again
            verified = Estimate(peak, total, total / max(self.flops, 1))
        return Plan(
            budget=budget,
            predicted=self.predicted(rung),
            verified=verified,
            unplanned_flops=self.flops,
            saved_bytes=rung.saved,
            compilations=compilations,
            kept=tuple(_kept(self.program, rung.choice)) if rung.choice else (),
            choice=rung.choice,
            signature=self.signature,
        )


def choose(
    candidates: Candidates,
    budget: int | float,
    compiled: Callable[[Rung], Memory] | None,
    who: str,
) -> Plan:
    """The plan of the row that fits: as compiled, or as predicted where nothing is compiled."""
    rungs, memory = candidates.rungs, {}

    def peak(i: int) -> int:
        if compiled is None:
            return candidates.predicted(rungs[i]).peak_bytes
        if i not in memory:
            memory[i] = compiled(rungs[i])
        return memory[i].peak

    found, top = None, len(rungs) - 1
    if isinstance(budget, float):
        least, most = sorted((peak(0), peak(top)))
        budget = int(least + budget * (most - least))
        # Compiled by now: a rung on the way that needs more than the top must not hide it.
        found = top if peak(top) <= budget else None
    if found is None:
        from_the_top = asks_plain_first(rungs[0].temporaries, rungs[top].temporaries)
        found = highest_that_fits(lambda i: peak(i) <= budget, len(rungs), from_the_top)
    if found is None and memory:
        # A fraction has asked the leanest before, which need not have been on the way.
        found = next((i for i in sorted(memory, reverse=True) if peak(i) <= budget), None)
    least = min(memory, key=lambda i: memory[i].peak) if memory else 0
    chosen = least if found is None else found
    verified = memory[chosen].peak if compiled else None
    plan = candidates.plan_of(rungs[chosen], budget, verified, len(memory))
    if found is None:
        raise BudgetError(_too_small(candidates, plan, memory.get(least), who), peak(least), plan)
    return plan


def _too_small(candidates: Candidates, plan: Plan, memory: Memory | None, who: str) -> str:
    peak = (plan.verified or plan.predicted).peak_bytes
    given, returned = candidates.given, candidates.returned
    between = max(peak - given - returned, 0)
    if memory is not None:
        given, returned, between = memory.arguments, memory.outputs, memory.temporaries
    return (
        f"{who}: the peak of the gradient of `{name_of(candidates.fn)}` is at least "
        f"{text_of(peak)}; the budget is {text_of(plan.budget)}. Of the least, arguments are "
        f"{text_of(given)}, results and gradients {text_of(returned)}, temporaries "
        f"{text_of(between)}, pinned most by {candidates.widest}. Raise the budget, or make the "
        "batch smaller: jrc.largest_batch finds how small."
    )


def _check_compilations(number: object, who: str) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= 10:
        raise ValueError(
            f"{who}: compilations is a whole number from 1 to 10; got {number!r}. Five find one of "
            "about thirty plans, each more doubles their number."
        )


def _check_loss(program: Program, fn: Callable[..., Any], who: str) -> None:
    aval: Any = program.jaxpr.outvars[0].aval if program.jaxpr.outvars else None
    if aval is None or aval.shape != () or not is_floating(aval):
        raise TypeError(
            f"{who}: the first result of `{name_of(fn)}` is a scalar loss, floating; got "
            f"{aval if aval is not None else 'nothing'}."
        )


def _moving(
    traced: Traced, args: tuple[Any, ...], argnums: int | Sequence[int], who: str
) -> list[Any]:
    """The program's inputs that are differentiated."""
    wanted = {argnums} if isinstance(argnums, int) else set(argnums)
    wanted = {n + len(args) if n < 0 else n for n in wanted}
    if not wanted or not wanted <= set(range(len(args))):
        raise ValueError(
            f"{who}: argnums names arguments by number, from 0 to {len(args) - 1}; got {argnums!r}."
        )
    counts = [len(split(jax.tree.map(as_array, arg))[0]) for arg in args]
    first = len(traced.inputs) - sum(counts)
    starts = [first + sum(counts[:n]) for n in range(len(args))]
    inputs = traced.program.jaxpr.invars
    chosen = [v for n in sorted(wanted) for v in inputs[starts[n] : starts[n] + counts[n]]]
    return [v for v in chosen if is_floating(v.aval)]


def _kept(program: Program, choice: Choice, times: int = 1) -> Iterable[Kept]:
    """What a choice keeps, equal values together, the largest first."""
    found: dict[str, tuple[int, int]] = {}
    for name, count, size in _each_kept(program, choice, times):
        n, total = found.get(name, (0, 0))
        found[name] = (n + count, total + size)
    kept = [Kept(name, n, size) for name, (n, size) in found.items()]
    return sorted(kept, key=lambda each: (-each.bytes, each.name))


def _each_kept(program: Program, choice: Choice, times: int) -> Iterable[tuple[str, int, int]]:
    for piece in choice.pieces:
        for p, i in piece.held:
            var = program.unmarked(program.eqns[p].outvars[i])
            name = label(program.eqns[max(program.producer[var], 0)])
            yield name, times, times * nbytes(var.aval)
        if piece.inside is not None:
            eqn = program.eqns[piece.positions[0]]
            (body,) = (opened(jaxpr) for jaxpr in [eqn.params["jaxpr"]])
            turns = piece.inside.chunks or repeats(eqn)
            yield f"carries of the loop at {place(eqn)}", times * turns, 0
            yield from _each_kept(body, piece.inside, times * repeats(eqn))


def agreed(plan: Plan) -> Plan:
    """Process 0's plan, in all processes."""
    if jax.process_count() == 1:
        return plan
    from jax.experimental import multihost_utils

    text = plan.to_json().encode()
    size = int(multihost_utils.broadcast_one_to_all(jnp.int32(len(text))))
    padded = jnp.frombuffer(text.ljust(size)[:size], dtype=jnp.uint8)
    return Plan.from_json(bytes(multihost_utils.broadcast_one_to_all(padded)).decode())
