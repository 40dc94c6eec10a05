"""What does not hold yet, by program; each is a strict `xfail` of `test_programs`."""

FAILURES: dict[str, dict[str, str]] = {"planned": {}, "leanest": {}}
"""For each test the programs that fail it, with the reason."""
