"""`python -m convert` (installed: `python -m jaxllm.convert`) as an alias of `jaxllm convert`."""

import sys

from jaxllm.__main__ import main

if __name__ == "__main__":
    sys.argv.insert(1, "convert")
    main()
