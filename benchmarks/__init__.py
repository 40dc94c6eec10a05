"""Benchmarks of jrc: each public module of a folder is a command.

    python -m benchmarks.memory.plan --toy

Run from the repository root. A module whose name begins with an underscore is part of a command.
`benchmarks/README.md` lists the commands and where a new one goes.
"""
