"""The options of a program: which values are saved, at every depth."""
