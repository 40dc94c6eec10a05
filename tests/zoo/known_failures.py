"""What does not hold yet, by program; each is a strict `xfail` of `test_programs`."""

_BLOCKS = "the leanest plan has a higher peak than a checkpoint around each block"

FAILURES: dict[str, dict[str, str]] = {
    "planned": {},
    "leanest": {
        "gemma": f"{_BLOCKS}, by 1 %",
        "encoder_decoder": f"{_BLOCKS}: the encoder's result is read by every block",
        "nnx_scan": f"{_BLOCKS} in a loop",
        "eqx_batchnorm": f"{_BLOCKS}, by one activation of a block",
    },
}
"""For each test the programs that fail it, with the reason."""
