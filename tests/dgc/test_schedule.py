import pytest

from jrc.dgc._schedule import active_levels, entries_to_send, level_starts

FIVE = (0.75, 0.9375, 0.984375, 0.996, 0.999)


@pytest.mark.parametrize(
    ("begin", "ramp", "levels", "starts"),
    [
        (0, 100, 5, (0, 20, 40, 60, 80)),
        (7, 100, 5, (7, 27, 47, 67, 87)),
        (0, 10, 5, (0, 2, 4, 6, 8)),
        (0, 7, 5, (0, 2, 3, 5, 6)),
        (0, 1, 1, (0,)),
        (3, 1, 5, (3, 4, 4, 4, 4)),
        (10, 2, 5, (10, 11, 11, 12, 12)),
    ],
)
def test_level_starts_golden(begin, ramp, levels, starts):
    assert level_starts(begin, ramp, levels) == starts


@pytest.mark.parametrize("ramp", [1, 2, 3, 4, 5, 7, 10, 64, 100])
@pytest.mark.parametrize("levels", [1, 2, 3, 5])
def test_level_starts_are_the_published_index(ramp, levels):
    starts = level_starts(4, ramp, levels)
    for t in range(4, 4 + 2 * ramp + 3):
        published = min(int((t - 4) * levels / ramp), levels - 1)
        assert sum(start <= t for start in starts) - 1 == published


def test_levels_without_a_step_are_dropped():
    assert active_levels(0, 1, FIVE) == ((0, 0.75), (1, 0.999))
    assert active_levels(0, 2, FIVE) == ((0, 0.75), (1, 0.984375), (2, 0.999))
    assert active_levels(5, 100, (0.999,)) == ((5, 0.999),)


@pytest.mark.parametrize(
    ("size", "counts"),
    [
        (102400, (25600, 6400, 1600, 409, 102)),
        (1_000_000, (250000, 62500, 15625, 4000, 1000)),
        (100, (25, 6, 1, 1, 1)),
        (1, (1, 1, 1, 1, 1)),
    ],
)
def test_entries_golden(size, counts):
    assert tuple(entries_to_send(size, level) for level in FIVE) == counts


def test_sparsity_zero_sends_all_entries():
    assert entries_to_send(1234, 0.0) == 1234


# Counts that Paddle's kernel gets in float32: above where the product falls short in float64,
# below where it does in float32.
@pytest.mark.parametrize(
    ("size", "sparsity", "double", "single"),
    [
        (100, 0.9, 9, 10),
        (1000, 0.99, 10, 9),
        (10_000, 0.999, 10, 9),
        (1_000_000, 0.999, 1000, 999),
        (1_000_000, 0.9999, 99, 100),
        (25_600_000, 0.999, 25_600, 25_599),
        (16_777_217, 0.996, 67_108, 67_109),
        (39_483, 0.999, 39, 39),
        (102_400, 0.75, 25_600, 25_600),
        (5, 0.9, 1, 1),
    ],
)
def test_entries_as_paddle_counts_them(size, sparsity, double, single):
    assert entries_to_send(size, sparsity) == double
    assert entries_to_send(size, sparsity, "float32") == single


def test_no_more_entries_than_there_are():
    # 2**24 + 3 has no float32 of its own, and the next one is larger.
    assert entries_to_send(2**24 + 3, 0.0, "float32") == 2**24 + 3
