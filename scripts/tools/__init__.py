"""Tools that check the repository, or make what its tests and pages need.

mutate: puts the faults of mutants/*.toml into a copy of the sources and runs their tests.
sanitize: builds the kernels with AddressSanitizer and UndefinedBehaviorSanitizer, and runs them.
run_arm: builds the kernels for aarch64 with arm_driver.cc, and runs them under an emulator.
bad_files: gives every command files that are wrong in every way.
interrupts: sends Ctrl-C to commands at random moments.
soak: runs many requests and generations in one process; memory and programs may not grow.
execute_notebooks: runs the notebooks and writes them with their outputs.
make_checkpoint: writes a random checkpoint of a published model's shape.
"""
