"""All file access of the package: size limits and schemas on reading, atomic writes.

reading: regular files of bounded size, JSON of bounded depth and digits. lines: JSON lines.
schema: checks of JSON fields. writing: atomic files and directories, and locks. patterns: regular
expressions from files and users. memory: the machine's memory.
"""

from jaxllm.files.lines import json_lines, split_lines
from jaxllm.files.memory import check_memory, give_back, machine_memory
from jaxllm.files.patterns import check_name_pattern, compile_pattern, match_names
from jaxllm.files.reading import (
    as_path,
    inside,
    is_there,
    open_regular,
    parse_json,
    read_bytes,
    read_json,
    read_text,
    regular_size,
)
from jaxllm.files.schema import as_schema, complaints_of
from jaxllm.files.writing import (
    check_vacant,
    copy_files,
    finite_json,
    locked,
    sweep,
    write_json,
    writing,
    writing_directory,
)

__all__ = [
    "as_path",
    "as_schema",
    "check_memory",
    "check_name_pattern",
    "check_vacant",
    "compile_pattern",
    "complaints_of",
    "copy_files",
    "finite_json",
    "give_back",
    "inside",
    "is_there",
    "json_lines",
    "locked",
    "machine_memory",
    "match_names",
    "open_regular",
    "parse_json",
    "read_bytes",
    "read_json",
    "read_text",
    "regular_size",
    "split_lines",
    "sweep",
    "write_json",
    "writing",
    "writing_directory",
]
