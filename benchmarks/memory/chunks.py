"""Measure programs with one array too large: as they are, planned in chunks, loops by hand.

    python -m benchmarks.memory.chunks --platform cpu --out chunks.json

Each program is run in turns with the others of its row; seconds are medians. Gradients are those
by all floating arguments; the Hessian and the per-example gradients are planned as they are
(`argnums=None`). Bytes are those of the compiled programs, FLOPs are counted with loops.

Some minutes. Nothing else should run on the machine.
"""

import argparse
import dataclasses
import functools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jrc
from benchmarks._lib import platform
from benchmarks._lib.command import Benchmark, Run, names_of
from benchmarks._lib.report import Report
from benchmarks._lib.table import Table
from benchmarks._private import flops, in_turns, memory_of

NAME = "memory.chunks"
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Program:
    """A program with one array too large.

    Attributes:
        title: What it is.
        fn: A loss, or with `argnums=None` what is run.
        args: Its arguments.
        budget: Bytes.
        argnums: What it is differentiated by.
        by_hand: The same function with a loop that a person would write.
    """

    title: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    budget: int
    argnums: tuple[int, ...] | None
    by_hand: Callable[..., Any] | None = None

    def run(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return what is compiled and run."""
        return fn if self.argnums is None else jax.value_and_grad(fn, self.argnums)


def head_loss(w: Any, x: Any, labels: Any) -> Any:
    """Return the mean cross-entropy of labels."""
    return jnp.mean(_losses(w, x, labels))


def _losses(w: Any, x: Any, labels: Any) -> Any:
    logits = x @ w
    picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def head_by_hand(w: Any, x: Any, labels: Any, chunks: int = 16) -> Any:
    """Return the same in a loop over chunks of tokens, recomputed in the backward pass."""
    parts = x.reshape(chunks, -1, x.shape[1]), labels.reshape(chunks, -1)
    one = jax.checkpoint(lambda w, x, labels: jnp.sum(_losses(w, x, labels)), prevent_cse=False)
    total, _ = jax.lax.scan(lambda sum_, part: (sum_ + one(w, *part), None), 0.0, parts)
    return total / x.shape[0]


def attention(q: Any, k: Any, v: Any) -> Any:
    """Return a number that depends on causal attention of some heads."""
    return jnp.mean(jnp.sin(_read(q, k, v, 0)))


def _read(q: Any, k: Any, v: Any, first: Any) -> Any:
    scores = jnp.einsum("hqd,hkd->hqk", q, k) / 8
    shape = (1, *scores.shape[1:])
    rows, columns = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (1, 2))
    weights = jax.nn.softmax(jnp.where(rows + first >= columns, scores, -jnp.inf))
    return jnp.einsum("hqk,hkd->hqd", weights, v)


def attention_by_hand(q: Any, k: Any, v: Any, chunks: int = 16) -> Any:
    """Return the same in a loop over chunks of queries, recomputed in the backward pass."""
    heads, length, size = q.shape
    parts = jnp.moveaxis(q.reshape(heads, chunks, -1, size), 1, 0)
    firsts = jnp.arange(chunks) * (length // chunks)
    one = jax.checkpoint(_read, prevent_cse=False)
    _, read = jax.lax.scan(
        lambda _, part: (None, one(part[0], k, v, part[1])), None, (parts, firsts)
    )
    return jnp.mean(jnp.sin(read))


def wide(w1: Any, w2: Any, x: Any) -> Any:
    """Return a number that depends on two wide MLPs."""
    for _ in range(2):
        x = x + jax.nn.gelu(x @ w1) @ w2
    return jnp.mean(x * x)


def wide_by_hand(w1: Any, w2: Any, x: Any) -> Any:
    """Return the same with each MLP under `jax.checkpoint`."""
    one = jax.checkpoint(lambda x: x + jax.nn.gelu(x @ w1) @ w2)
    for _ in range(2):
        x = one(x)
    return jnp.mean(x * x)


def _network(p: Any, x: Any) -> Any:
    return jnp.sum(jnp.tanh(x @ p.reshape(16, -1)))


def gradient_norms(p: Any, x: Any) -> Any:
    """Return the norm of the gradient of each example."""
    one = lambda p, x: jnp.sum(jnp.tanh(jnp.tanh(x @ p) @ p.T))  # noqa: E731
    return jnp.sum(jax.vmap(jax.grad(one), (None, 0))(p, x) ** 2, axis=(1, 2))


def programs(toy: bool) -> dict[str, Program]:
    """Return the programs by name."""
    keys = jax.random.split(jax.random.key(0), 3)
    draw = lambda i, *shape: jax.random.normal(keys[i], shape)  # noqa: E731
    tokens, words, queries, rows = (512, 8192, 512, 2048) if toy else (4096, 32_064, 4096, 8192)
    share = 16 if toy else 1
    labels = jax.random.randint(keys[2], (tokens,), 0, words)
    return {
        "head": Program(
            f"head and loss, {tokens:,} tokens x 256 x {words:,}", head_loss,
            (draw(0, 256, words) / 16, draw(1, tokens, 256), labels),
            (40 if toy else 300) * MIB, (0, 1), head_by_hand,
        ),
        "attention": Program(
            f"causal attention, 8 heads, {queries:,} tokens x 64", attention,
            tuple(draw(i, 8, queries, 64) for i in range(3)),
            300 * MIB // share, (0, 1, 2), attention_by_hand,
        ),
        "mlp": Program(
            f"two MLPs, {rows:,} x 256, 4,096 wide", wide,
            (draw(0, 256, 4096) / 16, draw(1, 4096, 256) / 64, draw(2, rows, 256)),
            (60 if toy else 200) * MIB, (0, 1), wide_by_hand,
        ),
        "hessian": Program(
            "Hessian of 1,024 parameters, 512 examples", jax.hessian(_network),
            (draw(0, 1024), draw(1, 512, 16)), 40 * MIB, None,
        ),
        "per_example": Program(
            f"gradient norms of {2048 // share:,} examples, 64 x 128", gradient_norms,
            (draw(0, 64, 128), draw(1, 2048 // share, 64)), 32 * MIB // share, None,
        ),
    }  # fmt: skip


NAMES = ("head", "attention", "mlp", "hessian", "per_example")


def measure(run: Run) -> None:
    """Measure each program that was asked for."""
    run.report |= platform.machine()
    found = run.report.setdefault("programs", {})
    for name, program in programs(run.options.toy).items():
        if name in run.options.programs:
            run.status(name)
            found[name] = one(program, run.options.rounds)
            run.save()


def one(program: Program, rounds: int) -> dict[str, Any]:
    """Return bytes, FLOPs and seconds of a program, planned and by hand."""
    plan = jrc.plan(program.fn, *program.args, budget=program.budget, argnums=program.argnums)
    ways = {"baseline": program.fn, "plan": plan.apply(program.fn)}
    ways |= {"by hand": program.by_hand} if program.by_hand else {}
    found: dict[str, Any] = {}
    calls: dict[str, Callable[[], Any]] = {}
    for way, fn in ways.items():
        compiled = jax.jit(program.run(fn)).lower(*program.args).compile()
        count = flops(jax.make_jaxpr(program.run(fn))(*program.args))
        found[way] = {"peak": memory_of(compiled).peak, "flops": count}
        calls[way] = functools.partial(compiled, *program.args)
    for way, seconds in in_turns(calls, rounds).items():
        found[way]["seconds"] = statistics.median(seconds)
    results = {way: jax.tree.leaves(call()) for way, call in calls.items()}
    for way, leaves in results.items():
        found[way]["differs"] = max(map(_difference, leaves, results["baseline"]))
    chunks = [{"name": each.name, "chunks": each.chunks} for each in plan.chunks]
    return {
        "title": program.title,
        "budget": program.budget,
        "ways": found,
        "chunks": chunks,
        "compilations": plan.compilations,
    }


def _difference(a: Any, b: Any) -> float:
    return float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)))


def tables(report: Report) -> list[Table]:
    """Return one table: bytes, and seconds and FLOPs over those of the baseline."""
    rows = []
    for each in report["programs"].values():
        base = each["ways"]["baseline"]
        for way, cost in each["ways"].items():
            chunks = ", ".join(str(c["chunks"]) for c in each["chunks"]) if way == "plan" else ""
            rows.append(
                (
                    each["title"] if way == "baseline" else "",
                    way,
                    chunks,
                    f"{cost['peak'] / MIB:,.0f} MiB",
                    f"{cost['flops'] / base['flops']:.3f} x",
                    f"{cost['seconds'] / base['seconds']:.2f} x",
                )
            )
    return [Table("One array too large", ("", "", "chunks", "peak", "FLOPs", "time"), rows)]


def problems(report: Report) -> list[str]:
    """Return what breaks a promise: a plan above its budget, another gradient."""
    wrong = []
    for name, each in report["programs"].items():
        cost = each["ways"]["plan"]
        if cost["peak"] > each["budget"]:
            wrong.append(f"{name}: the plan needs {cost['peak']} of {each['budget']} bytes")
        if cost["differs"] > 5e-6:
            wrong.append(f"{name}: results differ by {cost['differs']:.1e}")
    return wrong


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the programs."""
    parser.add_argument("--programs", type=names_of(NAMES), default=list(NAMES))
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count; default: 5")


BENCHMARK = Benchmark(
    NAME, __doc__, measure, tables, add_options, toy={"rounds": 1}, keys=("toy", "programs"),
    problems=problems,
)  # fmt: skip
main = BENCHMARK.main

if __name__ == "__main__":
    main()
