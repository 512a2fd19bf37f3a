"""A slow training run for the test that kills it; prints a digest of the parameters."""

import hashlib
import sys
import time
from pathlib import Path

from jaxllm.train import loop
from tests.train.test_loop import Texts, bits, run

if __name__ == "__main__":
    directory, name = Path(sys.argv[1]), sys.argv[2]
    loop.SAVE_SECONDS = loop.SAVE_FACTOR = 0

    def delay(line: str) -> None:
        time.sleep(0.2)

    plan = loop.TrainPlan(steps=200, eval_steps=1, gradient_accumulation_steps=2)
    found = run(directory / name, plan=plan, eval_data=Texts(seed=9), log=delay)
    digest = hashlib.sha256(b"".join(bits(found.params)[p] for p in sorted(bits(found.params))))
    print(digest.hexdigest(), [r[:5] for r in found.records][-1])
