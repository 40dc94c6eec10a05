"""Where a function is cut, and the transforms that recompute its segments."""
