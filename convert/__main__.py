"""`python -m convert` (installed: `python -m jaxllm.convert`) as an alias of `jaxllm convert`."""

from jaxllm import process

if __name__ == "__main__":
    process.begin()
    import sys

    from jaxllm.cli import main

    main(["convert", *sys.argv[1:]])
