"""The planner: a program weighed, the front of choices, and running what was chosen."""
