"""A plan: a frozen decision of what a function's gradient keeps, and what it makes again."""

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

from jrc._errors import name_of
from jrc._text import memory_text, table_text
from jrc._validate import check_json, check_json_fields
from jrc.remat._gradient.variable_changes import write_changes
from jrc.remat._planner.check_decision import check_decision, check_decision_fits, left_out
from jrc.remat._planner.decision import Decision
from jrc.remat._planner.execute import execute_decision
from jrc.remat._planner.signature import Signature, signature_of, traced_for_plan

_FORMAT = 2

_COST = {"peak_bytes": int, "flops": int, "flops_ratio": float}
_FIELDS = {
    "budget": int,
    "predicted": _COST,
    "unplanned_flops": int,
    "saved_bytes": int,
    "compilations": int,
    "kept": [{"name": str, "times": int, "bytes": int}],
    "equations": [str],
    "inputs": [str],
    "closed": int,
    "digest": str,
    "left_out": str,
}


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a gradient program costs.

    Attributes:
        peak_bytes: Arguments, outputs and temporaries of the compiled program on one device, less
            what is aliased.
        flops: Floating-point operations of the whole program, loops times their length.
        flops_ratio: The same over those with nothing re-run.
    """

    peak_bytes: int
    flops: int
    flops_ratio: float


@dataclasses.dataclass(frozen=True)
class Kept:
    """Values that a plan keeps, equal ones together.

    Attributes:
        name: Their mark, or operator, shape and source line.
        times: How many there are, turns of a loop included.
        bytes: What all of them take; on all devices together, where XLA shards them by itself.
    """

    name: str
    times: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `jrc.plan` returns: compare it, print it, store it, apply it.

    Attributes:
        budget: What was asked for, in bytes.
        predicted: The cost as the planner's model has it.
        verified: The cost as the compiled program has it; `None` if that was not asked for.
        unplanned_flops: Operations of the gradient program with nothing re-run.
        saved_bytes: Bytes kept after the forward pass besides the arguments, as predicted; on all
            devices together, where XLA shards them by itself.
        compilations: How many programs were compiled to find it.
        kept: What stays, the largest first; empty if nothing is re-run.
        choice: What runs again and what is kept, equation by equation; `None` if nothing is re-run.
        signature: The program that the plan is for.
    """

    budget: int
    predicted: Estimate
    verified: Estimate | None
    unplanned_flops: int
    saved_bytes: int
    compilations: int
    kept: tuple[Kept, ...]
    decision: Decision | None = dataclasses.field(repr=False)
    signature: Signature = dataclasses.field(repr=False)

    @property
    def reruns(self) -> bool:
        """Whether anything is re-run at all."""
        return self.decision is not None

    def apply[F: Callable[..., Any]](self, fn: F) -> F:
        """The function whose gradient keeps what this plan says.

        Args:
            fn: The function that the plan was made for, or one with the same program.

        Returns:
            The same function: equal values, gradients and random draws, under `jit`, `grad`,
            `vmap`, inside of `shard_map` and of a train step, with `nnx.grad` and
            `jax.grad(..., allow_int=True)` too (whose results for integers, a byte an element, no
            budget counts). What `fn` changes in flax nnx modules that it is given is changed
            there. No solver is needed.

        Raises:
            TypeError: If `fn` is no function; when called, if it does not take the arguments.
            ValueError: When called, if its program is another one than the plan's: other shapes,
                types, operators, axes, lengths of loops. Numbers in it may change, and what a
                `custom_vjp` or a `jax.checkpoint` policy keeps is not looked at.
        """
        who = "jrc.Plan.apply"
        if not callable(fn):
            raise TypeError(
                f"{who}: the argument is a function; got {type(fn).__name__}. Pass the function "
                "that the plan was made for, and call what comes back."
            )

        @functools.wraps(fn)
        def planned(*args: Any, **kwargs: Any) -> Any:
            traced = traced_for_plan(fn, args, kwargs, who)
            program = traced.program
            changed = self.signature.difference(signature_of(program, traced.closed))
            if changed:
                raise ValueError(
                    f"{who}: this plan was made for another program than that of `{name_of(fn)}`: "
                    f"{changed}. Shapes, types, operators and their order must be those that "
                    "jrc.plan saw; plan again with jrc.plan(fn, *args, budget=...)."
                )
            if self.decision is None:
                return fn(*args, **kwargs)
            check_decision_fits(self.decision, program, who)
            out, changes = traced.run(execute_decision(program, self.decision))
            write_changes((args, kwargs), changes, name_of(fn), who)
            return out

        return planned  # type: ignore[return-value]

    def to_json(self) -> str:
        """The plan as text that `Plan.from_json` reads, on any host."""
        data = {
            "format": _FORMAT,
            "budget": self.budget,
            "predicted": dataclasses.asdict(self.predicted),
            "verified": self.verified and dataclasses.asdict(self.verified),
            "unplanned_flops": self.unplanned_flops,
            "saved_bytes": self.saved_bytes,
            "compilations": self.compilations,
            "kept": [dataclasses.asdict(kept) for kept in self.kept],
            "decision": self.decision and self.decision.to_data(),
            "left_out": left_out(self.decision, len(self.signature.equations)),
            "equations": list(self.signature.equations),
            "digest": self.signature.digest,
            "inputs": list(self.signature.inputs),
            "closed": self.signature.closed,
        }
        return json.dumps(data, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Read a plan from the text of `to_json`.

        What is kept inside of loops is compared with their bodies when the plan is applied.

        Raises:
            ValueError: If the text is no plan, one of another format, or was changed so that it
                is none any more.
        """
        try:
            data = json.loads(text)
            _check_json(data)
            equations = tuple(data["equations"])
            decision = data["decision"] and Decision.from_data(data["decision"])
            _check_choice(decision, len(equations), data["left_out"])
            return cls(
                budget=data["budget"],
                predicted=Estimate(**data["predicted"]),
                verified=data["verified"] and Estimate(**data["verified"]),
                unplanned_flops=data["unplanned_flops"],
                saved_bytes=data["saved_bytes"],
                compilations=data["compilations"],
                kept=tuple(Kept(**each) for each in data["kept"]),
                decision=decision,
                signature=Signature(
                    equations, data["digest"], tuple(data["inputs"]), data["closed"]
                ),
            )
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"jrc.Plan.from_json: this is no plan of format {_FORMAT}, as Plan.to_json writes "
                f"it ({type(error).__name__}: {error}). Plan again with jrc.plan."
            ) from error

    def __str__(self) -> str:
        cost = self.verified or self.predicted
        source = "compiled" if self.verified else "predicted"
        head = (
            f"peak {memory_text(cost.peak_bytes)} ({source}; budget {memory_text(self.budget)}), "
            f"FLOPs {cost.flops_ratio:.3f} x those with nothing re-run"
        )
        if not self.reruns:
            return f"{head}\nnothing is re-run"
        rows = [(each.name, f"{each.times:,}", memory_text(each.bytes)) for each in self.kept[:12]]
        rest = self.kept[12:]
        if rest:
            times, size = sum(each.times for each in rest), sum(each.bytes for each in rest)
            rows.append((f"{len(rest)} more", f"{times:,}", memory_text(size)))
        return f"{head}\n{table_text(('kept', 'values', 'bytes'), rows)}"


def _check_json(data: Any) -> None:
    """Raise a `ValueError` that says which entry of a plan's data is not of its kind."""
    check_json(data, _FORMAT, _FIELDS)
    if data.get("verified") is not None:
        check_json_fields({"verified": data["verified"]}, {"verified": _COST})
    if data["closed"] > len(data["inputs"]):
        raise ValueError(f"closed is {data['closed']}, of {len(data['inputs'])} inputs")


def _check_choice(decision: Decision | None, count: int, without: str) -> None:
    """Raise a `ValueError` where a choice is not one for so many equations."""
    if decision is None:
        return
    check_decision(decision, count)
    if left_out(decision, count) != without:
        raise ValueError(
            f"decision: its stages leave out equations {left_out(decision, count) or 'none'}; "
            f"those that no result needs are {without or 'none'}"
        )
