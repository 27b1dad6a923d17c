from __future__ import annotations

from spardl.basics.errors import first_line


def test_one_line_of_any_error() -> None:
    assert first_line(ValueError("what\nwhere")) == "what"
    assert first_line(ValueError("\n  what  \nwhere")) == "what"
    assert first_line(ValueError()) == first_line(ValueError(" \n")) == "ValueError"
