"""Running a program under a decision."""
