"""Tools that check the repository, or make files for its tests and pages.

mutate: mutation testing with the faults of mutants/*.toml.
sanitize: the kernels under AddressSanitizer and UndefinedBehaviorSanitizer.
run_arm: the kernels for aarch64, built with arm_driver.cc and run under an emulator.
bad_files: every command with invalid files.
hostile_requests: hostile requests and clients that leave, against `jaxllm serve`.
same_bits: random requests in many ways, which must have the same bits.
soak: many requests and generations in one process, where memory and programs must not grow.
soak_server: clients of `jaxllm serve` with random options, half of whom leave.
execute_notebooks: execution of the notebooks, whose outputs are stored.
gpu_programs: what programs for a GPU consist of, compiled without one.
real_golden: what llama.cpp computes for the model of `make test-real`.
check_links: every link of the built site, without a network.
count_lines: count the package's lines, records, errors and modules with one importer.
write_file_fixtures: small files of every kind, which later versions must read.
family_features: the table of what is tested of each family.
terminal_picture: the moving picture of README.
make_checkpoint: a random checkpoint with a published model's shape.
"""
