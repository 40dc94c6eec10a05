"""A plan: what a function's gradient saves and what it recomputes, as a frozen value."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jrc._dataclass_json import from_json_text, json_text
from jrc._errors import public
from jrc._targets import link_bandwidth_of
from jrc._text import Grid, flops_text, html_of, memory_text, seconds_text, text_of
from jrc._validate import check_flag, one_of
from jrc._version import __version__
from jrc.remat._chunks.chunks import Chunks, chunks_table, chunks_text
from jrc.remat._gradient.opaque import Opaque, opaque_lines
from jrc.remat._planner.execute.apply_decision import apply_decision
from jrc.remat._planner.execute.chunked_function import chunked_function, planned_chunks
from jrc.remat._planner.plan.decision import AsWritten, Baseline, Decision
from jrc.remat._planner.plan.plan_candidates import (
    Estimate,
    PlanCandidate,
    candidates_table,
    kept_table,
    predicted_line,
    sent_text,
)
from jrc.remat._planner.plan.policy_by_names import ByName, lost_text, policy_of
from jrc.remat._planner.plan.saved_by_plan import Kept
from jrc.remat._planner.program.signature import Signature

_FORMAT = f"jrc.Plan/21 of jrc {__version__}"
"""Another version may number the equations of a program otherwise."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `jrc.plan` returns: compare it, print it, store it, apply it.

    Attributes:
        budget: What was asked for, in bytes.
        predicted: The cost as the planner's model has it.
        verified: The cost of the compiled program; `None` if that was not asked for.
        unplanned_flops: FLOPs of the gradient program of the baseline, where nothing is recomputed.
        saved_bytes: Predicted bytes that are saved after the forward pass besides the arguments;
            on all devices together, where XLA shards them by itself.
        compilations: How many programs were compiled to find it.
        kept: What is saved, the largest first; empty if nothing is recomputed.
        candidates: Every candidate, the leanest first, with its cost and what changes from one to
            the next. Behind the one that recomputes nothing stand manual plans, by name, and last
            the baseline, if something runs in chunks.
        decision: What is saved and recomputed, equation by equation.
        signature: The program that the plan is for.
        opaque: What the planner could not look into, the most bytes first: functions with a
            `custom_vjp`, regions that were respected.
        by_name: What names can say of it; `names` and `policy` are made of this.
        target: The name of the target that it was made for; empty for the devices of the process.
        baseline_recomputed: FLOPs of the baseline that run the forward pass again, inside of
            functions such as `jrc.recompute_scan`, as `jrc.explain` counts them.
        minimize: What it has the least of, among the candidates that fit: `"time"` or `"flops"`.
        chunks: The regions of the program that run in chunks; `decision` and `signature` are those
            of the program with these; or of one chunk, where the whole loss runs in chunks.
        whole: The program without chunks; `None` if nothing runs in chunks.
    """

    budget: int
    predicted: Estimate
    verified: Estimate | None
    unplanned_flops: int
    saved_bytes: int
    compilations: int
    kept: tuple[Kept, ...]
    candidates: tuple[PlanCandidate, ...] = dataclasses.field(repr=False)
    decision: Decision = dataclasses.field(repr=False)
    signature: Signature = dataclasses.field(repr=False)
    opaque: tuple[Opaque, ...] = dataclasses.field(default=(), repr=False)
    by_name: ByName = dataclasses.field(default=ByName(), repr=False)
    target: str = ""
    baseline_recomputed: int = 0
    minimize: str = "flops"
    chunks: tuple[Chunks, ...] = ()
    whole: Signature | None = dataclasses.field(default=None, repr=False)

    @property
    def reruns(self) -> bool:
        """Whether anything is recomputed at all."""
        return not isinstance(self.decision, Baseline)

    @property
    def plans_one_chunk(self) -> bool:
        """Whether the whole loss runs in chunks, and the plan is one for each of them."""
        return any(each.is_whole_loss for each in self.chunks)

    @public("jrc.Plan.apply")
    def apply[F: Callable[..., Any]](self, fn: F) -> F:
        """Return the function whose gradient saves what this plan decides.

        Args:
            fn: The function that the plan was made for, or one with the same program.

        Returns:
            The same function: equal values, gradients and random draws, under `jit`, `grad`,
            `vmap`, inside of `shard_map` and of a train step, with `nnx.grad` and
            `jax.grad(..., allow_int=True)` too (whose results for integers, a byte an element, no
            budget counts). What `fn` changes in flax nnx modules that it is given is changed
            there.

        Raises:
            TypeError: If `fn` is no function; when called, if it does not take the arguments.
            ValueError: When called, if its program is another one than the plan's: other shapes,
                types, operators, axes, lengths of loops. Numbers in it may change, and what a
                `custom_vjp` or a `jax.checkpoint` policy saves is not compared.
        """
        if self.plans_one_chunk and self.whole:
            return planned_chunks(fn, self.chunks, self.whole, self.decision, self.signature)
        if self.chunks:
            respected = self.signature.respect_checkpoints
            fn = chunked_function(fn, self.chunks, respected, self.whole)
        return apply_decision(fn, self.decision, self.signature)

    @public("jrc.Plan.names")
    def names(self, *, approximate: bool = False, memory: str = "device") -> tuple[str, ...]:
        """Return the tags of the values that this plan saves, for what takes a list of names.

        Tags are those of `jax.ad_checkpoint.checkpoint_name` and `jrc.mark`. Names say a plan if
        all that it saves is tagged, and of each name all values or none. Where the function has
        `jax.checkpoint` regions, they say what these regions save: what is made outside, and what
        enters a region, is saved in any case. Where a derivative reads a result from before its
        tag (a tanh), JAX runs that operator again.

        Args:
            approximate: Whether to return the nearest names where they do not say the plan: of all
                sets of tags that need about the bytes which the plan saves (at most a tenth more),
                the one that recomputes the fewest FLOPs. The peak and the FLOPs are then others
                than the plan's: look with `jrc.explain`.
            memory: Where the values lie: `"device"`, or `"pinned_host"` for those that a plan with
                `offload=True` moves there.

        Raises:
            ValueError: If names do not say the plan; the message says what would be lost.
        """
        one_of(memory, "memory", ("device", "pinned_host"))
        self._check_by_name(approximate, is_policy=False)
        return self.by_name.names if memory == "device" else self.by_name.offloaded

    @public("jrc.Plan.policy")
    def policy(self, *, approximate: bool = False) -> Callable[..., Any]:
        """Return the plan as a policy of `jax.checkpoint`, for frameworks that take one.

        It is one of JAX's own policies by names, and so is right with `JAX_REMAT3=1`. It is meant
        for the `jax.checkpoint` regions that the function has, as in a model with `nn.remat`
        around each block, or else for one around the whole function. See `names`.

        Args:
            approximate: As for `names`.

        Returns:
            `save_only_these_names(...)`, or `save_and_offload_only_these_names(...)` where values
            lie in the host's memory; `nothing_saveable` where no name is saved, and
            `everything_saveable` where nothing is recomputed.

        Raises:
            ValueError: If names do not say the plan, or `jrc.mark` alone gives them, which no
                policy of JAX sees.

        Example:
            >>> import functools, jax, jax.numpy as jnp
            >>> from jax.ad_checkpoint import checkpoint_name
            >>> def loss(w, x, policy=None):
            ...     block = lambda x: jnp.tanh(checkpoint_name(jnp.sin(x) @ w, "dot"))
            ...     for _ in range(4):
            ...         x = jax.checkpoint(block, policy=policy)(x)
            ...     return jnp.sum(x)
            >>> plan = jrc.plan(loss, jnp.ones((8, 8)), jnp.ones((64, 8)), budget=0.0)
            >>> there = functools.partial(loss, policy=plan.policy(approximate=True))
        """
        self._check_by_name(approximate, is_policy=True)
        return policy_of(self.by_name, self.decision)

    def _check_by_name(self, approximate: bool, is_policy: bool) -> None:
        check_flag(approximate, "approximate")
        if self.chunks:
            raise ValueError(
                f"the plan must be one that names can say, got {chunks_text(self.chunks)}, which "
                "no names say. Plan again with jrc.plan(..., chunks=False)."
            )
        lost = lost_text(self.by_name, self.decision, is_policy)
        if lost and not approximate:
            raise ValueError(
                "the plan must be one that names can say, got one of which they lose: "
                f"{lost}. Name these values with jax.ad_checkpoint.checkpoint_name and plan again, "
                "or pass approximate=True for the nearest names."
            )

    def to_json(self) -> str:
        """Return the plan as text that `Plan.from_json` reads, on any host."""
        return json_text(self, _FORMAT)

    @classmethod
    @public("jrc.Plan.from_json")
    def from_json(cls, text: str) -> "Plan":
        """Return the plan that `to_json` wrote.

        Raises:
            ValueError: If the text is no plan, one of another version of jrc, or was changed.
        """
        try:
            return from_json_text(cls, text, _FORMAT)
        except ValueError as error:
            raise ValueError(
                f"text must be what Plan.to_json writes, of format {_FORMAT!r}, got {error}. Plan "
                "again with jrc.plan."
            ) from error

    def __str__(self) -> str:
        """The cost, what is saved, and the candidates beside the plan."""
        return text_of(self._parts())

    def _repr_html_(self) -> str:
        """Return the plan for a notebook."""
        return html_of(self._parts())

    def _parts(self) -> list[str | Grid]:
        """Return the lines and tables of the plan."""
        cost = self.verified or self.predicted
        source = "compiled" if self.verified else "predicted"
        where = f" on one device of {self.target}" if self.target else ""
        parts: list[str | Grid] = [
            f"peak {memory_text(cost.peak_bytes)}{where} ({source}; budget "
            f"{memory_text(self.budget)}), "
            f"FLOPs {cost.flops_ratio:.3f} x those of the baseline"
        ]
        if self.baseline_recomputed:
            where = "functions with a custom_vjp"
            if self.signature.respect_checkpoints:
                where += " or jax.checkpoint regions"
            amount = flops_text(self.baseline_recomputed)
            parts.append(f"the baseline itself recomputes {amount}, inside of {where}")
        if cost.seconds is not None:
            parts.append(f"time {seconds_text(cost.seconds)} ({cost.seconds_from})")
        if cost.host_bytes:
            parts.append(f"saved in the host's memory: {memory_text(cost.host_bytes)} ({source})")
        chosen = next((each for each in self.candidates if each.is_chosen), None)
        parts += sent_text(chosen, link_bandwidth_of(self.target))
        if self.plans_one_chunk:
            parts.append(f"{chunks_text(self.chunks)}, each with its gradient; in each of them")
        if isinstance(self.decision, AsWritten):
            parts.append("the function runs as it is, under its own jax.checkpoint regions")
        else:
            parts.append(kept_table(self.kept) if self.reruns else "nothing is recomputed")
        if regions := [each for each in self.chunks if not each.is_whole_loss]:
            parts.append(chunks_table(regions))
        parts += opaque_lines(self.opaque)
        if len(self.candidates) > 1:
            parts.append(candidates_table(self.candidates))
            parts.extend(predicted_line(self.candidates))
        return parts
