"""`jaxllm` and `python -m jaxllm`: set up streams and signals before anything is imported."""

import sys

from jaxllm.runtime import signals


def main() -> None:
    """Run the command line."""
    signals.setup_process()
    if sys.argv[1:2] == ["generate"] and "--server" in " ".join(sys.argv):
        from jaxllm.server import ask

        if ask.main(sys.argv[2:]):
            return
    from jaxllm.cli import main

    main()


if __name__ == "__main__":
    main()
