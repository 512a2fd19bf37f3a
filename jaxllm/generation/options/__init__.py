"""Generation options: one table that validates every source of options.

`LM.generate`, `LM.stream`, requests to `LM.serve`, lines of a batch file, command line flags and
generation_config.json are all checked against it before anything is loaded or run. Options have
Hugging Face's names; for common names of other libraries the error suggests ours.

table: the options and their types. validators: validators of single validators. check: validation
of whole requests.
"""

from jaxllm.generation.options.check import (
    Kind,
    check_combination,
    check_options,
    check_values,
    row_options,
    select_mode,
)
from jaxllm.generation.options.table import (
    OPTIONS,
    PLAIN,
    GenerateOptions,
    Option,
    document_options,
)
from jaxllm.generation.options.validators import StoppingCriterion

__all__ = [
    "OPTIONS",
    "PLAIN",
    "GenerateOptions",
    "Kind",
    "Option",
    "StoppingCriterion",
    "check_combination",
    "check_options",
    "check_values",
    "document_options",
    "row_options",
    "select_mode",
]
