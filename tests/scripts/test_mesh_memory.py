"""The table of what devices hold is of what they hold."""

import mesh_memory


def test_a_mesh_holds_what_was_planned() -> None:
    held, total, planned, grew = mesh_memory.measured("demo:llama", "data=2,tensor=2", "none")
    assert held == planned
    assert total == 4 * held
    assert 0 <= grew < 1 << 30
