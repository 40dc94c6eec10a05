"""Deep gradient compression: bytes of a step, time of its parts, what accelerators compile."""
