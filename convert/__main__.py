"""`python -m convert SRC DST [--dtype bfloat16] [--to-hf]`."""

from convert.command import EXAMPLES, convert
from jaxllm.cli import run_command

if __name__ == "__main__":
    run_command(
        convert, "python -m convert", EXAMPLES.replace("jaxllm convert", "python -m convert")
    )
