"""The border of files: whatever is read from a disk comes in here, what is written goes out.

`reading.py`: regular files of bounded size, JSON of bounded depth and digits, checked by a schema.
`writing.py`: files and directories that appear when they are complete, and locks. `patterns.py`:
regular expressions that a file may bring. `memory.py`: what the machine has.
"""

from jaxllm.files.memory import check_memory, machine_memory
from jaxllm.files.patterns import compile_pattern
from jaxllm.files.reading import (
    as_schema,
    open_regular,
    parse_json,
    read_bytes,
    read_json,
    read_text,
    regular_size,
)
from jaxllm.files.writing import locked, sweep, write_json, writing, writing_directory

__all__ = [
    "as_schema",
    "check_memory",
    "compile_pattern",
    "locked",
    "machine_memory",
    "open_regular",
    "parse_json",
    "read_bytes",
    "read_json",
    "read_text",
    "regular_size",
    "sweep",
    "write_json",
    "writing",
    "writing_directory",
]
