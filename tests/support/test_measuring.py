from __future__ import annotations

import pytest

from tests.support.measuring import undisturbed


def test_disturbed_measurements_are_repeated() -> None:
    values = iter([7, 5, 2, 1])
    assert undisturbed(lambda: next(values), lambda value: value < 3) == 2
    assert next(values) == 1


@pytest.mark.parametrize(("seconds", "said"), [(100.0, "[9, 8, 7]"), (-1.0, "[9]")])
def test_what_is_never_within_its_bounds_fails(seconds: float, said: str) -> None:
    values = iter([9, 8, 7, 1])
    with pytest.raises(pytest.fail.Exception) as error:
        undisturbed(lambda: next(values), lambda value: value < 3, times=3, seconds=seconds)
    assert str(error.value).endswith(f"within the bounds: {said}")
