"""The script's bytes are those of logits."""

import logits_memory


def test_a_step_without_whole_logits_takes_and_sends_less() -> None:
    took, sent, part, part_sent = logits_memory.measured("tensor=2", 2003, 4, 32)
    whole, share = (4 * 32 * n * 4 for n in (2004, 1002))
    assert took - part >= whole - share
    assert sent - part_sent == whole + share  # gathered, and their gradient scattered
    assert part_sent == 0
