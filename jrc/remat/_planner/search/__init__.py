"""Which option is compiled next, and which one is the plan."""
