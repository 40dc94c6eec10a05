"""Finding a plan: a row of candidates, of which compiled programs show the one that fits."""

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jrc._errors import name_of
from jrc._multihost import all_or_none
from jrc._text import exact_memory_text, memory_text
from jrc._tree import aval_of
from jrc._validate import check_flag
from jrc.remat._budget import BudgetError, checked_budget
from jrc.remat._candidates import Candidates
from jrc.remat._memory import Memory, memory_needed
from jrc.remat._plan import Plan
from jrc.remat._planning.ladder import Rung, highest_that_fits

_logger = logging.getLogger("jrc")

# Rungs at the lean end that lie so close that XLA may need less for the second or the third.
_LEANEST = 3


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
    one device: arguments + outputs + temporaries - aliased. Integers, keys and the like in a
    differentiated argument (a train state, a flax nnx module) get no gradient. With arguments that
    `jit` shards over devices, compiled peaks, and so budgets and fractions of them, are right. A
    predicted peak has one device's part of the arguments, the same of their gradients, and all of
    the temporaries, because only XLA knows how those are sharded: with `verify=False` it may be
    larger than the true one by as many times as there are devices. In `shard_map` sizes are those
    of one device.

    A plan for one device's part of the data, with that part's shapes, may be applied inside of
    `shard_map`: to see a mesh axis changes nothing in a program but its types.

    Args:
        fn: A JAX-traceable function of pytrees that returns a scalar loss, floating; pure, but
            that it may change variables of flax nnx modules that it is given.
        *args: Its arguments, by position: arrays, numbers, or `jax.ShapeDtypeStruct`s, in any
            pytree. Numbers are traced, as under `jax.jit`; strings, functions and the like stay
            what they are, and are passed to the planned function in the same way. Others are
            bound before: `functools.partial(fn, train=True)` is what is planned and applied to.
        budget: Bytes (`int`), text (`"1.5GiB"`, `"800MB"`), or a fraction (`float` in [0, 1])
            between the least peak that is reached (0) and that with nothing re-run (1). A fraction
            costs up to four more compilations, for the two ends.
        argnums: The arguments that are differentiated.
        has_aux: Whether `fn` returns `(loss, aux)`.
        verify: Whether programs are compiled. Without, the plan is the model's guess, which
            does not promise to fit.
        compilations: How many programs may be compiled (two, if one is asked for: the leanest and
            the plain one); each more halves the steps of the row of plans. One is enough where
            nothing need be re-run, one more is compiled where only the model thought so, and up to
            four more before a budget is refused, for the two ends.

    Returns:
        The plan. The same inputs give the same plan on every host, and more budget never one with
        more predicted FLOPs. With several processes all of them get that of process 0.

    Raises:
        TypeError: If `fn` is no function, does not take the arguments, does not return a scalar
            loss as `has_aux` says, or the budget is neither a number nor text.
        ValueError: If the budget is no size, `compilations` below 1, or there is nothing floating
            to be differentiated.
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
        return memory_needed(candidates.lowered(rung))

    return agreed(lambda: choose(candidates, budget, compiled if verify else None, who), who)


def plan_within(
    fn: Callable[..., Any],
    lower: Callable[[Callable[..., Any]], jax.stages.Lowered],
    budget: int | str | float,
    who: str,
    has_aux: Callable[[Any], bool],
) -> Plan:
    """The plan for a function inside of a larger program, whose whole peak is to fit.

    Args:
        fn: A function that the program calls by position and differentiates by its first argument.
        lower: The program, lowered, with another function in the place of this one.
        budget: As for `plan`.
        who: The name under which errors speak.
        has_aux: Of what `fn` returned, whether it is `(loss, aux)`.

    Returns:
        The plan; its FLOPs are those of the function's gradient, counted where it is traced.
    """
    limit = checked_budget(budget, who)

    def find() -> Plan:
        found: list[Candidates] = []

        @functools.wraps(fn)
        def recorded(*args: Any) -> Any:
            out = fn(*args)
            if not found:
                avals = jax.tree.map(aval_of, args)
                found.append(Candidates.of(fn, avals, 0, has_aux(out), who))
            return out

        lower(recorded)
        (candidates,) = found
        flops: dict[Rung, int] = {}

        def compiled(rung: Rung) -> Memory:
            applied = candidates.applied(rung, fn)

            @functools.wraps(fn)
            def counted(*args: Any) -> Any:
                # In here mesh axes have their names, as they had when the row was made.
                if rung not in flops:
                    flops[rung] = candidates.counted(rung)
                return applied(*args)

            return memory_needed(lower(counted))

        return choose(candidates, limit, compiled, who, flops)

    return agreed(find, who)


def choose(
    candidates: Candidates,
    budget: int | float,
    compiled: Callable[[Rung], Memory] | None,
    who: str,
    flops: Mapping[Rung, int] | None = None,
) -> Plan:
    """The plan of the row that fits: as compiled, or as predicted where nothing is compiled.

    `flops` has the operations of rungs that `compiled` counts; else they are counted here.
    """
    rungs, memory = candidates.rungs, {}

    def peak(i: int) -> int:
        if compiled is None:
            return candidates.predicted(rungs[i]).peak_bytes
        if i not in memory:
            place = f"plan {i + 1} of {len(rungs)}, the leanest first"
            _logger.info("%s: compiling %s", who, place)
            memory[i] = compiled(rungs[i])
            _logger.info("%s: %s: a peak of %s", who, place, memory_text(memory[i].peak))
        return memory[i].peak

    found, top, lean = None, len(rungs) - 1, range(min(_LEANEST, len(rungs)))
    if isinstance(budget, float):
        least, most = sorted((min(map(peak, lean)), peak(top)))
        budget = int(least + budget * (most - least))
        # Compiled by now: a rung on the way that needs more than the top must not hide it.
        found = top if peak(top) <= budget else None
    elif compiled and candidates.predicted(rungs[top]).peak_bytes <= budget:
        # Nobody waits for a search who has room enough.
        found = top if peak(top) <= budget else None
    if found is None:
        from_the_top = candidates.plain_first
        more = math.ceil(math.log2(len(rungs) + 1)) < candidates.compilations
        found = highest_that_fits(
            lambda i: peak(i) <= budget, len(rungs), from_the_top, more and not from_the_top
        )
    if found is None and memory:
        # Nobody is told that it cannot be who has not asked the two ends, the lean one first.
        found = max((i for i in (*memory, *lean) if peak(i) <= budget), default=None)
        found = top if found is None and peak(top) <= budget else found
    least = min(memory, key=lambda i: memory[i].peak) if memory else 0
    chosen = least if found is None else found
    verified = memory[chosen].peak if compiled else None
    counted = (flops or {}).get(rungs[chosen])
    plan = candidates.plan_of(rungs[chosen], budget, verified, len(memory), counted)
    if found is None:
        raise BudgetError(_too_small(candidates, plan, memory.get(least), who), peak(least), plan)
    return plan


def _too_small(candidates: Candidates, plan: Plan, memory: Memory | None, who: str) -> str:
    what = "the gradient of" if who == "jrc.plan" else "the whole step around"
    peak = (plan.verified or plan.predicted).peak_bytes
    given, returned = candidates.given, candidates.returned
    between = max(peak - given - returned, 0)
    if memory is not None:
        given, returned, between = memory.arguments, memory.outputs, memory.temporaries
    return (
        f"{who}: the peak of {what} `{name_of(candidates.fn)}` is at least "
        f"{exact_memory_text(peak)}; the budget is {memory_text(plan.budget)}. Of the least, "
        f"arguments are {memory_text(given)}, results and gradients {memory_text(returned)}, "
        f"temporaries {memory_text(between)}, pinned most by {candidates.widest}. Raise the "
        "budget, or make the batch smaller: jrc.largest_batch finds how small."
    )


def _check_compilations(number: object, who: str) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= 10:
        raise ValueError(
            f"{who}: compilations is a whole number from 1 to 10; got {number!r}. Five find one of "
            "about thirty plans, each more doubles their number."
        )


def agreed(find: Callable[[], Plan], who: str) -> Plan:
    """Find a plan on every process and return process 0's; an error on one is an error on all."""
    if jax.process_count() == 1:
        return find()
    from jax.experimental import multihost_utils

    # A process that raised would never come to the broadcast, where the others wait.
    text = all_or_none(find, who).to_json().encode()
    size = int(multihost_utils.broadcast_one_to_all(jnp.int32(len(text))))
    padded = jnp.frombuffer(text.ljust(size)[:size], dtype=jnp.uint8)
    return Plan.from_json(bytes(multihost_utils.broadcast_one_to_all(padded)).decode())
