"""All file access of the package: size limits on reading, atomic writes.

reading: regular files of bounded size, JSON of bounded depth and digits. jsonl: JSON lines. atomic:
atomic files and directories, and locks. json_log: append-only logs, to resume from. plots: PNG
files. regex_limits: regular expressions from files and users. memory_limit: the machine's memory
limit. versions: the versions of our own file formats. program_folder: the folder of compiled
programs.
"""

from jaxllm.files.atomic import (
    atomic_directory,
    atomic_file,
    check_vacant,
    copy_files,
    finite_json,
    lock_file,
    remove_partials,
    write_json,
)
from jaxllm.files.json_log import JsonLog
from jaxllm.files.jsonl import iterate_lines, read_json_lines, split_lines
from jaxllm.files.memory_limit import check_memory, machine_memory, release_pages
from jaxllm.files.reading import (
    as_path,
    open_regular,
    parse_json,
    path_exists,
    path_inside,
    read_bytes,
    read_json,
    read_text,
    regular_size,
)
from jaxllm.files.regex_limits import compile_pattern, match_names

__all__ = [
    "JsonLog",
    "as_path",
    "atomic_directory",
    "atomic_file",
    "check_memory",
    "check_vacant",
    "compile_pattern",
    "copy_files",
    "finite_json",
    "iterate_lines",
    "lock_file",
    "machine_memory",
    "match_names",
    "open_regular",
    "parse_json",
    "path_exists",
    "path_inside",
    "read_bytes",
    "read_json",
    "read_json_lines",
    "read_text",
    "regular_size",
    "release_pages",
    "remove_partials",
    "split_lines",
    "write_json",
]
