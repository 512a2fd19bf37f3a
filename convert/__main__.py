"""`python -m convert SRC DST [--dtype bfloat16] [--to-hf]`."""

from jaxllm.cli import run_command
from jaxllm.cli.convert import EXAMPLES, convert

if __name__ == "__main__":
    run_command(
        convert, "python -m convert", EXAMPLES.replace("jaxllm convert", "python -m convert")
    )
