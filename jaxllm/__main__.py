"""`jaxllm` and `python -m jaxllm`: the process is taken in hand before anything is imported."""

from jaxllm import process


def main() -> None:
    """The entry point."""
    process.begin()
    from jaxllm.cli import main

    main()


if __name__ == "__main__":
    main()
