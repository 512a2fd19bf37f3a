"""Programs beside the package: `benchmarks/`, `tools/`, `demo_models/` and `examples/`.

Run each as a file from the root of the repository: `python scripts/FOLDER/NAME.py --help`. The
docstring of a folder's `__init__.py` has a line for each of its files.
"""
