"""`jaxllm` and `python -m jaxllm`: set up streams and signals before anything is imported."""

from jaxllm.runtime import signals


def main() -> None:
    """Run the command line."""
    signals.setup_process()
    from jaxllm.cli import main

    main()


if __name__ == "__main__":
    main()
