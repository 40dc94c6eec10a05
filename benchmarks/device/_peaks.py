"""Peak of a gradient program: as compilers state it, and as the device's allocator saw it.

The allocator's peak is the most of a process, so that each row is a process of its own. Autotuning
is off (`XLA_FLAGS` of the part): its buffers would count. The allocator's figure is

    peak_bytes_in_use after the run - bytes_in_use before it + bytes of the arguments

What a run keeps, besides its results, is a figure of its own: workspaces of libraries, constants.

"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax

import jrc
from benchmarks._private import abstract_on, chip_of_device, compiled_with_memory, memory_of
from benchmarks.device._programs import make
from benchmarks.device._rows import NO_STATS, Row, Settings, serve
from tests.zoo.program import gradient


def measure(name: str, settings: Settings) -> Iterator[Row]:
    """Yield both peaks of a program, and then that of the compile-only target of this device."""
    program, device = make(name, settings.toy), jax.local_devices()[0]
    run, arrays = gradient(program, program.loss)
    compiled = jax.jit(run).lower(*arrays).compile()
    memory = memory_of(compiled)
    jax.block_until_ready(arrays)
    before = device.memory_stats()
    out = jax.block_until_ready(compiled(*arrays))
    after = device.memory_stats()
    yield {"compiled": memory.peak, "arguments": memory.arguments} | allocated(
        before, after, memory.arguments
    )
    if before and after:
        results = sum(x.nbytes for x in jax.tree.leaves(out))
        yield {"kept": after["bytes_in_use"] - before["bytes_in_use"] - results}
    if chip := chip_of_device(device):
        yield {"target": chip.name, "target_peak": target_peak(run, arrays, chip.name)}


def allocated(
    before: Mapping[str, int] | None, after: Mapping[str, int] | None, arguments: int
) -> Row:
    """Return the bytes that a program took, from the allocator's figures around its run.

    Args:
        before: `device.memory_stats()` when the program is compiled and its arguments exist.
        after: The same when it has run once.
        arguments: Bytes of the arguments.

    Returns:
        `measured`; `None`, with the reason, where the device states nothing, or where something
        before the program needed more.
    """
    if not before or not after:
        return {"measured": None, "why": NO_STATS}
    if after["peak_bytes_in_use"] <= before["peak_bytes_in_use"]:
        return {"measured": None, "why": "what came before it needed more memory"}
    return {"measured": after["peak_bytes_in_use"] - before["bytes_in_use"] + arguments}


def target_peak(run: Any, arrays: Any, name: str) -> int:
    """Return the peak of a program as compiled for an accelerator that need not be there."""
    target = jrc.target(name)
    lowered = jax.jit(run).lower(*abstract_on(target, tuple(arrays)))
    return compiled_with_memory(lowered, target.platform)[0].peak


if __name__ == "__main__":
    serve(measure)
