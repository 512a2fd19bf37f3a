"""`python -m jaxllm`: the command `jaxllm`."""

from jaxllm.cli import main

main()
