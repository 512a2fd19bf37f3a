"""`python -m convert SRC DST`, installed `python -m jaxllm.convert SRC DST`: `jaxllm convert`."""

from jaxllm import process

if __name__ == "__main__":
    process.begin()
    import sys

    from jaxllm.cli import main

    main(["convert", *sys.argv[1:]])
