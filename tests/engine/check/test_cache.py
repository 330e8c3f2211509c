"""-check of a cache: to be written, there already, or impossible."""

from datasets import CacheProgress, cache_image_sets, load_image_sets
from engine.check.cache import check_cache
from engine.check.quick_checks import OK, WARN
from tests.engine.check.small_photos import sets_of
from tests.support.configs import small_config


def test_a_cache_that_is_to_be_made_one_that_fits_and_one_that_cannot_be(check, photos, tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    options = ["-opts", "DATA.CACHE=disk", f"DATA.CACHE_PATH={folder}"]
    verdict, told = check(*options)["cache"]
    assert verdict == OK and not folder.exists()
    assert "training images: about 1 MiB will be written to" in told and "iB are free" in told

    config, *sets = sets_of(photos, *options[1:])
    cache_image_sets(config, sets, CacheProgress(print, print))
    verdict, told = check(*options)["cache"]
    assert verdict == OK and f"training images: 1 MiB in {folder}" in told and "will be" not in told
    (index,) = folder.glob("*training*.index")
    index.write_bytes(b"")
    verdict, told = check(*options)["cache"]
    assert str(index) in told and "training images: about" in told

    (tmp_path / "file").write_text("")
    found = check("-opts", "DATA.CACHE=disk", f"DATA.CACHE_PATH={tmp_path}/file/cache")["cache"]
    assert found[0] == WARN and "DATA.CACHE_PATH" in found[1]
    monkeypatch.setattr("engine.check.cache.free_bytes", lambda place: 100)
    found = check(*options)["cache"]
    assert found[0] == WARN and "DATA.CACHE=256" in found[1]


def test_sets_without_a_cache_are_named(tmp_path):
    config = small_config(tmp_path, "DATA.CACHE=disk")
    parts = list(zip(("training", "validation"), load_image_sets(config), strict=True))
    assert "none of the training images, which are in memory already" in check_cache(config, parts).found
