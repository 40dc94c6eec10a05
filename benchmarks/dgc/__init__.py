"""Deep gradient compression: bytes of a step, time of its parts, compile time."""
