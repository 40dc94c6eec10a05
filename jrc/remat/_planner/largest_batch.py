"""The largest batch that fits into a budget."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jrc._errors import name_of, public
from jrc._progress import shown_meanwhile
from jrc._targets import Target, abstract_on, checked_target, target_device_context
from jrc._text import html_of, memory_text
from jrc._validate import check_flag, one_of, whole_number
from jrc.remat._gradient.arguments import refuse_tracers
from jrc.remat._planner.budget import (
    checked_budget,
    checked_compilations,
    checked_reserve,
    limit_of,
)
from jrc.remat._planner.costs.copy_bandwidth import copy_bandwidth_of
from jrc.remat._planner.costs.cost_unit import Minimize
from jrc.remat._planner.plan.plan import Plan
from jrc.remat._planner.plan.plan_of_process_0 import plan_of_process_0
from jrc.remat._planner.search.batches import Batches
from jrc.remat._planner.search.problem import Problem, Request


class FastestBatch(NamedTuple):
    """The batch of most examples a second, of those that were compiled and fit.

    Attributes:
        batch: The batch.
        per_second: Examples a second, by the seconds of the compiled program.
        recomputes: Whether its program recomputes anything.
    """

    batch: int
    per_second: float
    recomputes: bool


class LargestBatch(NamedTuple):
    """How many examples fit.

    Attributes:
        plain: The largest batch of the baseline; 0 if none fits.
        recomputed: The largest batch that some plan fits; 0 if none does.
        plan: The cheapest plan for `recomputed` examples; `None` if none fits.
        most: The bound of the search, a multiple of `multiple_of`: where a size is this, more may
            fit.
        fastest: The batch of most examples a second, of those that were compiled on the way;
            `None` where nothing is known of the device's rates. A larger batch that is no faster
            helps where the optimization gains by it.
        least_bytes: Where none fits, the least bytes that are known of the smallest batch: the
            compiled peak of a plan, or arguments, results and gradients.
    """

    plain: int
    recomputed: int
    plan: Plan | None
    most: int
    fastest: FastestBatch | None = None
    least_bytes: int = 0

    def __str__(self) -> str:
        """Both sizes, and the plan."""
        return f"{self._head()}\n{self.plan}" if self.plan else self._head()

    def _repr_html_(self) -> str:
        """Return both sizes and the plan for a notebook."""
        return html_of([self._head()]) + (self.plan._repr_html_() if self.plan else "")

    def _head(self) -> str:
        if self.plan is None:
            return (
                f"None fits: the smallest batch needs {memory_text(self.least_bytes)}. Raise the "
                "budget."
            )
        more = " (more may: `most` ends there)" if self.recomputed == self.most else ""
        head = f"{self.plain:,} fit without a plan, {self.recomputed:,} with this one{more}"
        if self.plan.plans_one_chunk and not more:
            head += " (more do, as here with the whole loss in chunks)"
        cost = self.plan.verified
        if cost and cost.seconds:
            head += f", {self.recomputed / cost.seconds:,.4g} examples a second"
        if self.fastest and self.fastest.batch != self.recomputed:
            how = "with" if self.fastest.recomputes else "without"
            head += (
                f"; most a second are {self.fastest.per_second:,.4g}, {how} recomputation of a "
                f"batch of {self.fastest.batch:,}"
            )
        return f"{head}:"


@public("jrc.largest_batch")
def largest_batch(
    make_args: Callable[[int], Sequence[Any]],
    fn: Callable[..., Any],
    budget: int | str | None = None,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    multiple_of: int = 1,
    most: int = 2**20,
    respect_checkpoints: bool = False,
    target: Target | str | None = None,
    offload: bool | float = False,
    minimize: Minimize = "time",
    chunks: bool = True,
    reserve: Any = None,
) -> LargestBatch:
    """Return the largest batch whose gradient fits a budget, with and without recomputation.

    Bytes grow nearly in proportion to the batch, so that a few compilations find it. Predictions
    say where to begin, and no program is compiled if arguments, results and gradients of the
    smallest batch exceed the budget. Nothing is run.

    Args:
        make_args: From a batch size the tuple of arguments of `fn`: arrays, or better
            `jax.ShapeDtypeStruct`s, which take no memory.
        fn: As for `jrc.plan`.
        budget: Bytes on one device, as a number or as text (`"16GiB"`). If it is left out it is
            nine tenths of the memory of one device, as for `jrc.plan`.
        argnums: As for `jrc.plan`.
        has_aux: As for `jrc.plan`.
        multiple_of: Only batches that are a multiple of this, as when they are cut over devices.
        most: The largest batch that is looked at.
        respect_checkpoints: As for `jrc.plan`.
        target: As for `jrc.plan`.
        offload: As for `jrc.plan`: saved values of loops may lie in the host's memory. How much
            the host has is not looked at: `plan.verified.host_bytes` is what it needs.
        minimize: As for `jrc.plan`.
        chunks: Whether regions of the program, such as the logits and the loss, or attention, may
            run in chunks. The batch is looked for without chunks of the whole loss, with which any
            batch would fit; the plan for it may have them.
        reserve: As for `jrc.plan`: what else lies on each device, such as the optimizer's state.

    Returns:
        Both sizes and the plan for the larger one.

    Raises:
        TypeError: If `make_args` or `fn` is no function, the budget no size in bytes, what they
            return not what it has to be, or an array is traced.
        ValueError: If the budget is no size, `reserve` leaves nothing of it, `multiple_of` is below
            1 or above `most`, the arguments do not grow with the batch, or `offload` is what
            `jrc.plan` does not take. What `make_args` raises goes on to the caller.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def loss(w, x):
        ...     for _ in range(8):
        ...         x = jnp.tanh(x @ w)
        ...     return jnp.sum(x)
        >>> def make_args(batch):
        ...     shapes = (16, 16), (batch, 16)
        ...     return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        >>> found = jrc.largest_batch(make_args, loss, "100kB")
        >>> 0 < found.plain < found.recomputed
        True

    Source: bytes are XLA's for the compiled program.
    """
    if not callable(make_args) or not callable(fn):
        which, given = ("make_args", make_args) if not callable(make_args) else ("fn", fn)
        raise TypeError(
            f"{which} must be a function, got {type(given).__name__}. Write "
            "jrc.largest_batch(lambda batch: (params, shapes(batch)), loss_fn, '16GiB')."
        )
    if _takes_one(make_args) is False:
        raise TypeError(
            f"make_args must be a function of the batch alone, got `{name_of(make_args)}"
            f"{inspect.signature(make_args)}`. It comes first, then the loss function: write "
            "jrc.largest_batch(lambda batch: (params, shapes(batch)), loss_fn, '16GiB')."
        )
    check_flag(has_aux, "has_aux")
    check_flag(respect_checkpoints, "respect_checkpoints")
    check_flag(chunks, "chunks")
    one_of(minimize, "minimize", ("time", "flops"))
    there = checked_target(target)
    if budget is not None and not isinstance(checked_budget(budget), int):
        raise TypeError(
            f"budget must be bytes (an int) or text ('16GiB'), got {budget!r}. A fraction or a "
            "share has no meaning before the batch is known. Write bytes: '16GiB'."
        )
    reserved = checked_reserve(reserve)
    for name, number in (("multiple_of", multiple_of), ("most", most)):
        all_of_them = "every batch" if name == "multiple_of" else "all up to a million"
        whole_number(number, name, least=1, remedy=f"Leave it out to try {all_of_them}.")
    if most < multiple_of:
        raise ValueError(
            "most must be >= multiple_of, the smallest batch that is tried, got "
            f"most={most}, multiple_of={multiple_of}. Raise most."
        )

    def arguments(batch: int) -> tuple[Any, ...]:
        try:
            args = make_args(batch)
        except Exception as error:
            error.add_note(
                f"jrc.largest_batch: raised by `{name_of(make_args)}` for a batch of {batch}."
            )
            raise
        if not isinstance(args, tuple | list):
            raise TypeError(
                f"`{name_of(make_args)}` must return the arguments of fn as a tuple, got "
                f"{type(args).__name__}. For one argument write `return (x,)`."
            )
        refuse_tracers(args)
        return abstract_on(there, tuple(args)) if there else tuple(args)

    asks_device = there is None and (budget is None or offload is not False)
    placed = arguments(int(multiple_of)) if asks_device else ()
    limit: Any = limit_of(budget, there, placed, reserved)
    copy_bandwidth = copy_bandwidth_of(offload, there, jax.tree.leaves(placed))

    def problem_of(batch: int) -> Problem:
        return Problem.of(
            Request(
                fn,
                arguments(batch),
                argnums,
                has_aux,
                respect_checkpoints,
                target=there.name if there else "",
                copy_bandwidth=copy_bandwidth,
                minimize=minimize,
            )
        )

    step, end = int(multiple_of), int(most // multiple_of * multiple_of)
    compilations = checked_compilations(None)
    batches = Batches(problem_of, limit, step, end, compilations, chunks)
    with shown_meanwhile("jrc.largest_batch: tracing"), target_device_context(there):
        without = batches.without()
        recomputed = batches.recomputed(without)
        if not recomputed:
            return LargestBatch(0, 0, None, end, least_bytes=batches.least_bytes())
        if recomputed == end and recomputed > step:
            _check_growth(arguments(step), arguments(end), step, end, name_of(make_args))
        found = plan_of_process_0(lambda: batches.plan(recomputed, without))
        fastest = batches.fastest()
    return LargestBatch(without, recomputed, found, end, fastest and FastestBatch(*fastest))


def _takes_one(fn: Callable[..., Any]) -> bool | None:
    """Whether a function can be called with one argument; `None` if its signature is not known."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(1)
    except TypeError:
        return False
    return True


def _check_growth(
    small: tuple[Any, ...], large: tuple[Any, ...], least: int, most: int, name: str
) -> None:
    """Raise where arguments for the least and the most are alike, so that all of them fit."""
    shapes = [[np.shape(x) for x in jax.tree.leaves(args)] for args in (small, large)]
    if shapes[0] == shapes[1]:
        raise ValueError(
            f"`{name}` must return arguments that grow with the batch, got the "
            f"same shapes for {least} and for {most}. Use the batch as a size of some of them."
        )
