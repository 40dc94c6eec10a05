"""Seconds and bytes of GPT-2's gradient in PyTorch and in JAX, in turns on one device.

Parameters are float32 and are cast to bfloat16 in the loss, in both libraries; the model is the
GPT of `jrc.models` and its twin of `benchmarks.pytorch`. Bytes are what a pass needs besides the
arguments, gradients included: of PyTorch as its allocator states them, of JAX as the compiler does.
"""

import contextlib
import functools
import pathlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._lib.child import Worker
from benchmarks._private import cross_entropy, memory_of, program_figures
from benchmarks.device._plans import plans_of
from benchmarks.device._rows import Row, Settings, serve
from benchmarks.device._seconds import BASELINE, BY_HAND, compiled, planned
from benchmarks.pytorch._programs import has_torch, write_arguments
from jrc.models import gpt
from tests.zoo.program import Program, Remat, wrapped

PART = "torch"
NAMES, TOY_NAMES = ("GPT-2 124M, 8 x 1,024 tokens",), ("toy GPT-2",)
ROUNDS, TOY_ROUNDS = 10, 2
DTYPE = "bfloat16"
WAYS = {
    "eager": {"checkpoint": False, "budget": None},
    "compiled": {"checkpoint": False, "budget": 1.0},
    "compiled, budget 0.5": {"checkpoint": False, "budget": 0.5},
    "compiled, budget 0.25": {"checkpoint": False, "budget": 0.25},
    "compiled, checkpoints": {"checkpoint": True, "budget": 1.0},
}
"""The ways of PyTorch; a budget is an `activation_memory_budget`."""


def measure(name: str, settings: Settings) -> Iterator[Row]:
    """Yield bytes, seconds, loss and norm of the gradient of each way."""
    program, toy = make(settings.toy), settings.toy
    plans, failed = plans_of(settings, PART, name, lambda: planned(program, toy))
    losses = {BASELINE: program.loss, BY_HAND: program.build({})}
    losses |= {name: plan.apply(program.loss) for name, plan in plans.items()}
    found: dict[str, list[Row]] = {}
    with contextlib.ExitStack() as stack:
        started = torch_workers(stack, program, toy)
        # Both libraries compile at the same time.
        ways = {f"JAX, {way}": each for way, each in compiled(program, losses).items()}
        workers, failed_ways = ready(started)
        failed |= failed_ways
        for _ in range(TOY_ROUNDS if toy else ROUNDS):
            for way, worker in workers.items():
                found.setdefault(f"PyTorch, {way}", []).append(worker.ask())
            for way, each in ways.items():
                found.setdefault(way, []).append(jax_pass(*each))
    rows = {
        way: passes[-1] | {"seconds": statistics.median(each["seconds"] for each in passes)}
        for way, passes in found.items()
    }
    for way, (each, _) in ways.items():
        rows[way]["stated"] = program_figures(each)["stated"]
    yield {"ways": rows, "failed": failed}


def config_of(toy: bool) -> gpt.Config:
    """Return the sizes of GPT-2, or tiny ones."""
    if toy:
        return gpt.Config(vocabulary=128, layers=2, heads=2, width=16, length=16)
    return gpt.Config(vocabulary=50_304, layers=12, heads=12, width=768, length=1024)


def make(toy: bool) -> Program:
    """Return the model with arrays as arguments."""
    config = config_of(toy)

    def build(remat: Remat) -> Any:
        block = wrapped(functools.partial(gpt.block, config=config), remat)

        def loss(params: Any, tokens: Any) -> Any:
            params = jax.tree.map(lambda x: x.astype(DTYPE), params)
            x = gpt.embed(params, tokens[:, :-1], config)
            for name in config.boundaries:
                x = block(params[name], x)
            return cross_entropy(gpt.unembed(params, x), tokens[:, 1:])

        return loss

    shape = (2 if toy else 8, config.length + 1)
    tokens = np.random.default_rng(0).integers(0, config.vocabulary, shape).astype(np.int32)
    return Program(build, (gpt.init(jax.random.key(0), config), jnp.asarray(tokens)))


def torch_workers(stack: contextlib.ExitStack, program: Program, toy: bool) -> dict[str, Worker]:
    """Start a process for each way of PyTorch; none where it is not installed."""
    if not has_torch():
        return {}
    config = config_of(toy)
    params, tokens = program.args
    mask = np.triu(np.ones((config.length, config.length), bool), 1)
    folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
    path = write_arguments(folder, params, (np.asarray(tokens), mask))
    device = "cpu" if jax.default_backend() == "cpu" else "cuda"
    given = {
        "twin": "gpt", "options": {"heads": config.heads}, "arguments": str(path),
        "device": device, "dtype": DTYPE,
    }  # fmt: skip
    return {
        way: stack.enter_context(Worker("pytorch._torch_steps", given | own))
        for way, own in WAYS.items()
    }


def ready(workers: dict[str, Worker]) -> tuple[dict[str, Worker], dict[str, str]]:
    """Return the processes that have compiled and ran once, and what the others failed with."""
    failed = {} if workers else {"PyTorch": "is not installed"}
    for way, worker in workers.items():
        try:
            worker.ask()
        except RuntimeError as error:
            failed[f"PyTorch, {way}"] = str(error)[-300:]
    return {
        way: worker for way, worker in workers.items() if f"PyTorch, {way}" not in failed
    }, failed


def jax_pass(compiled: Any, run: Any) -> Row:
    """Return what one pass gives and takes."""
    memory, began = memory_of(compiled), time.perf_counter()
    (value, _), gradients = jax.block_until_ready(run())
    seconds = time.perf_counter() - began
    norm = jnp.sqrt(sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(gradients)))
    return {
        "seconds": seconds,
        "resident": memory.peak - memory.arguments,
        "loss": float(value),
        "gradient_norm": float(norm),
    }


if __name__ == "__main__":
    serve(measure)
