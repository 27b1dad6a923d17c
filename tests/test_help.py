from __future__ import annotations

import pytest
from hydra import initialize_config_dir
from hydra._internal import config_loader_impl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType

from train import CONFIGURATIONS, _listing_at_once


def listed() -> list[list[str]]:
    with initialize_config_dir(str(CONFIGURATIONS), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        groups = loader.get_group_options("", ObjectType.GROUP)
        return [groups, *(loader.get_group_options(group) for group in groups)]


def test_the_same_is_listed_without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    slowly, before = listed(), GlobalHydra.instance()
    monkeypatch.setattr(config_loader_impl, "CachingConfigRepository", None)
    with _listing_at_once():
        assert listed() == slowly
    assert GlobalHydra.instance() is before
    with pytest.raises(TypeError):
        listed()
