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


def test_nothing_kept_back_sends_all():
    assert entries_to_send(1234, 0.0) == 1234
