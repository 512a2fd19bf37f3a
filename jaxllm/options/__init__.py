"""The border of options: everything that may be asked of a generation, in one table.

`LM.generate`, `LM.stream`, requests to `LM.serve`, lines of a batch file, the commands' flags and
generation_config.json are all checked by it, before anything is loaded or run. The names are those
of Hugging Face; common names of other libraries are answered with ours.

table: every option, with its type; values: what its values may be. check: whole requests against
it.
"""

from jaxllm.options.check import Kind, check_options, check_values, check_ways, row_options, way_of
from jaxllm.options.table import (
    OPTIONS,
    PLAIN,
    GenerateOptions,
    Option,
    described,
)
from jaxllm.options.values import Ends

__all__ = [
    "OPTIONS",
    "PLAIN",
    "Ends",
    "GenerateOptions",
    "Kind",
    "Option",
    "check_options",
    "check_values",
    "check_ways",
    "described",
    "row_options",
    "way_of",
]
