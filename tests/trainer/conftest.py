"""What tests of whole runs share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.driver import here, only_run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Path]:
    """Folders of finished runs by command; filled as tests ask for them."""
    return _Undisturbed(tmp_path_factory)


class _Undisturbed(dict[tuple[str, ...], Path]):
    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders

    def __missing__(self, words: tuple[str, ...]) -> Path:
        folder = self._folders.mktemp("undisturbed")
        assert here(*words, f"output_dir={folder}") == 0
        self[words] = only_run(folder)
        return self[words]
