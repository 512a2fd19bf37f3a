"""Generation options: one table that validates every source of options.

`LM.generate`, `LM.stream`, requests to `LM.serve`, lines of a batch file, command line flags and
generation_config.json are all checked against it before anything is loaded or run. Options have
Hugging Face's names; for common names of other libraries the error suggests ours.

table: the options and their types. values: validators of single values. check: validation of whole
requests.
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
