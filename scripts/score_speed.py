"""Tokens a second that `jaxllm batch --task score` has, by how many texts run together.

    python scripts/score_speed.py demo:llama --texts 512 --longest 24 --rows 1 8 32

Random texts of 8 to `--longest` tokens, in one process. All numbers of rows take turns, after a
round in which programs are compiled; medians of the others.
"""

import argparse
import json
import statistics
import time

import numpy as np

import jaxllm
from jaxllm.fleet.job import Job
from jaxllm.fleet.processes import Here
from jaxllm.fleet.rows import read_lines
from jaxllm.fleet.running import stream


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="as jaxllm.load takes it")
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--longest", type=int, default=200, help="tokens of a text (200)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="run together")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    lm = jaxllm.load(asked.model, show_progress=False)
    draw = np.random.default_rng(0).integers
    lengths = draw(8, asked.longest, asked.texts)
    texts = [draw(3, lm.config.vocab_size, n).tolist() for n in lengths]
    given = read_lines(map(json.dumps, texts))

    def seconds(rows: int) -> float:
        began = time.perf_counter()
        job = Job(task="score", options={}, rows=rows)
        assert all("error" not in answer for answer in stream(given, job, Here(lambda: lm)))
        return time.perf_counter() - began

    found = [[seconds(rows) for rows in asked.rows] for _ in range(asked.rounds + 1)][1:]
    print("| rows together | tokens/s |\n|---|---|")
    for rows, column in zip(asked.rows, zip(*found, strict=True), strict=True):
        print(f"| {rows} | {lengths.sum() / statistics.median(column):,.0f} |")


if __name__ == "__main__":
    main()
