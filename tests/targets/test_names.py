"""Names of targets, published figures, and descriptions of GPUs."""

import math
import re

import pytest

import jrc
from jrc._targets.chips import CHIPS
from jrc._targets.gpu_description import HARDWARE, gpu_description
from jrc._targets.names import shapes_of


@pytest.mark.parametrize(
    "given, name, devices",
    [
        ("v5e", "v5e:1", 1),
        ("v5e:1", "v5e:1", 1),
        ("v5e:1x1", "v5e:1", 1),
        ("V5E:2x2", "v5e:2x2", 4),
        ("v5e:8", "v5e:2x4", 8),
        ("v6e:16x16", "v6e:16x16", 256),
        ("v4:2x2x1", "v4:2x2x1", 4),
        ("v5p:4x4x4", "v5p:4x4x4", 64),
        ("v5p:1", "v5p:1", 1),
        ("tpu7x:2x2x1", "tpu7x:2x2x1", 8),
        ("h100", "h100", 1),
        ("h100:1", "h100", 1),
        ("h100:8", "h100:8", 8),
        ("h100:8x2", "h100:8x2", 16),
        ("gb200:72", "gb200:72", 72),
    ],
)
def test_a_name_has_one_usual_form(given, name, devices):
    target = jrc.target(given)
    assert (target.name, target.device_count) == (name, devices)
    assert jrc.target(target.name) == target


@pytest.mark.parametrize(
    "given, rule",
    [
        ("v5e:3x3", "one of the slices 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16"),
        ("v5e:3", "one of the slices 1x1"),
        ("v5e:2x2x1", "one of the slices 1x1"),
        ("v5e:", "one of the slices 1x1"),
        ("v4:1", "one of the slices 2x2x1"),
        ("v5p:8", "one of the slices 1x1x1, 2x2x1, 2x2x2"),  # Cloud's v5p-8 has four chips
        ("v5p:4x4x5", ".* multiples of 4 with A <= B <= C and at most 6,144 chips"),
        ("v5p:8x4x4", ".* multiples of 4 with A <= B <= C"),
        ("h100:9", "1 to 8 devices in a node"),
        ("h100:0", "1 to 8 devices in a node"),
        ("h100:8x2x1", "1 to 8 devices in a node"),
        ("h100:-1", "1 to 8 devices in a node"),
        ("v5x", r"begin with one of v4, v5e, .*got 'v5x' \(did you mean 'v5p', 'v5e'\?\)"),
        ("", "begin with one of v4"),
    ],
)
def test_an_error_lists_what_there_is(given, rule):
    with pytest.raises(ValueError, match=rf"^jrc\.target: name must (have )?{rule}") as caught:
        jrc.target(given)
    for example in re.findall(r"Write for instance '([^']+)'", str(caught.value)):
        assert jrc.target(example)


def test_a_name_is_text():
    with pytest.raises(TypeError, match="name must be text, got int. Write jrc.target"):
        jrc.target(8)


def test_every_figure_has_a_source():
    for chip in CHIPS.values():
        figures = jrc.target(chip.name + ":2x2x1" * (chip.name == "v4")).figures
        assert all(each.source for each in figures.values()), chip.name
        unknown = [name for name, each in figures.items() if each.value is None]
        here = ["host_bandwidth", "copy_bandwidth"]
        assert unknown == (here if chip.name == "tpu7x" else [])


def test_tables_name_everything():
    text = str(jrc.targets())
    assert all(re.search(rf"^ *{name} ", text, re.M) for name in CHIPS)
    one = str(jrc.target("v5e:2x2"))
    assert one.startswith("v5e:2x2: 4 devices of TPU v5e; each has") and "16 GiB" in one
    assert all(name in one for name in jrc.target("v5e").figures)


def test_the_budget_is_nine_tenths_of_a_device():
    assert jrc.target("v5e:4x4").budget == int(0.9 * 16 * 2**30)


def test_shapes_grow():
    for kind in ("v4", "v5e", "v5p", "v6e", "tpu7x"):
        chips = [math.prod(dims) for dims in shapes_of(kind)]
        assert chips == sorted(chips) and len(set(shapes_of(kind))) == len(chips)


def test_gpu_descriptions_are_balanced_text():
    assert set(HARDWARE) == {chip.name for chip in CHIPS.values() if chip.platform == "gpu"}
    for name in HARDWARE:
        text = gpu_description(name)
        assert text.count("{") == text.count("}") and "core_count" in text
        assert f"device_memory_size: {jrc.target(name).memory_bytes}\n" in text
