"""Memory: what recomputation saves, what it costs, and what fits a device."""
