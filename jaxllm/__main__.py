"""`jaxllm` and `python -m jaxllm`: set up streams and signals before anything is imported."""

import sys

from jaxllm.errors import ConfigError, requires_extra
from jaxllm.runtime import signals


def main() -> None:
    """Run the command line."""
    signals.setup_process()
    try:
        with requires_extra("cli", "the command line"):
            from jaxllm.cli import main
    except ConfigError as error:
        sys.exit(f"jaxllm: {error}")
    main()


if __name__ == "__main__":
    main()
