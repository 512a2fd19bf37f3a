"""`jaxllm` and `python -m jaxllm`: set up streams and signals before anything is imported."""

from jaxllm import process


def main() -> None:
    """Run the command line."""
    process.begin()
    from jaxllm.cli import main

    main()


if __name__ == "__main__":
    main()
