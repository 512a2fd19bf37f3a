"""`python -m convert` (installed: `python -m jaxllm.convert`) as an alias of `jaxllm convert`."""

from jaxllm.runtime import signals

if __name__ == "__main__":
    signals.setup_process()
    import sys

    from jaxllm.cli import main

    main(["convert", *sys.argv[1:]])
