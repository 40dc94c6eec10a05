"""In the lowered program a second convolution feeds BatchNorm's gradient."""

import jax
import pytest
import show_recompute
from rich.console import Console

import jrc
from tests.examples.runs import run
from tests.remat.measure import operators

BOUNDARIES = ["block_0", "block_1"]


def listing(*kept):
    """Return the program in which `kept` blocks are not recomputed; all of them: the plain one."""
    if len(kept) == len(BOUNDARIES):
        return show_recompute.Listing(show_recompute.loss)
    lean = jrc.recompute_segments(show_recompute.loss, BOUNDARIES, no_recompute_segments=kept)
    return show_recompute.Listing(lean)


@pytest.mark.parametrize("kept", [(0, 1), (0,), (1,), ()])
def test_a_second_convolution_feeds_batch_norm_s_gradient(kept):
    program = listing(*kept)
    for i, block in enumerate(BOUNDARIES):
        forward = program.forward(block)
        again = program.reruns(forward)
        normalised = program.normalised(program.gradients[f"{block}/scale"])
        behind = program.convolutions_of(normalised)
        if i in kept:
            assert again == [] and behind == [forward]
            continue
        (second,) = again
        assert behind == [second] and second != forward
        # Equal operands, after a barrier that keeps XLA from merging the two.
        assert second.operands != forward.operands
        assert [*map(program.source, second.operands)] == [*map(program.source, forward.operands)]
        assert program.name(second.operands[1]) == f"{block}/w"
    # Forward, gradient of the weights of each block, and of the second block's input.
    assert len(program.convolutions()) == 5 + 2 - len(kept)


def test_the_listing_misses_no_operation():
    args = show_recompute.arguments()
    counts = operators(jax.value_and_grad(show_recompute.loss), *args)
    program = listing(0, 1)
    for theirs, ours in (("conv_general_dilated", "convolution"), ("rsqrt", "rsqrt")):
        assert counts[theirs] == sum(o.operator == ours for o in program.operations) > 0
    shapes = sorted(o.shape for o in program.convolutions())
    assert shapes == ["3x3x4x4"] * 2 + ["8x6x6x4"] * 3


@pytest.mark.slow
@pytest.mark.parametrize(("kept", "count"), [((0, 1), 5), ((0,), 6)])
def test_xla_does_not_merge_the_two(kept, count):
    fn = show_recompute.loss
    if len(kept) < 2:
        fn = jrc.recompute_segments(fn, BOUNDARIES, no_recompute_segments=kept)
    compiled = jax.jit(jax.value_and_grad(fn)).lower(*show_recompute.arguments()).compile()
    assert compiled.as_text().count(" convolution(") == count


@pytest.mark.slow
def test_prints_both_programs():
    console = Console(width=150, record=True)
    with console.capture() as captured:
        show_recompute.show(console, "After", listing(0))
    lines = captured.get().splitlines()
    program = listing(0)
    forward = program.forward("block_1")
    (again,) = program.reruns(forward)
    (row,) = [line for line in lines if f"RE-RUN of {forward.result} " in line]
    assert again.result in row and "convolution" in row and "block_1/w" in row
    assert any(f"gradient of BatchNorm's scale, from {again.result} " in line for line in lines)
    text = run("show_recompute")
    assert "Before, the baseline: 5 convolutions" in text
    assert "After, block_1 re-run: 6 convolutions" in text and text.count("RE-RUN") == 1
