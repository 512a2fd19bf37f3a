"""Services for commands, independent of models: signals, processes, progress, checked arguments.

signals: interrupts and the cleanup of temporary files. multihost: broadcast and agreement between
processes. supervisor: the parent of a distributed command. progress: progress bars. validation:
checks of integers, arrays and token ids. schema: checks of JSON values and dataclass fields.
docstrings: a docstring's arguments as data. plugins: what other packages add.
"""
