"""Programs outside the package: `benchmarks/`, `tools/`, `demo_models/` and `examples/`.

Run each as a file from the repository root: `python scripts/FOLDER/NAME.py --help`. The docstring
of each folder's `__init__.py` describes its files in a line each.
"""
