"""The plan as a value: its decision, tables, names and storage."""
