"""-check reports the size of a cache, or its location."""

from datasets.cache import CacheProgress, cache_image_sets
from tests.engine.check.small_photos import sets_of
from tests.support.configs import replaced, small_config
from tests.support.opened import open_sets
from tests.support.refusals import assert_names


def test_check_reports_expected_cache_size_or_existing_cache_location(photos, tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    config, *sets = sets_of(photos, "DATA.CACHE=disk", f"DATA.CACHE_PATH={folder}")

    def told(given=config, sets=sets) -> str:
        lines: list[str] = []
        progress = CacheProgress(lines.append, lambda line: lines.append(f"warning: {line}"), is_check=True)
        cache_image_sets(given, sets, progress)
        return "\n".join(lines)

    assert_names(told(), "12 images, about 1 MiB in", "6 images, about 1 MiB in", "are free")
    assert not folder.exists()
    with monkeypatch.context() as patch:
        patch.setattr("datasets.cache.free_bytes", lambda place: 100)
        patch.setattr("datasets.cache.estimate_bytes", lambda *given: 101)
        assert told().count("warning: ") == 2 and "DATA.CACHE=256" in told()
    cache_image_sets(config, sets, CacheProgress(print, print))
    assert f"12 training images, 1 MiB, in {folder}" in told() and "about" not in told()
    (tmp_path / "file").write_text("")
    below_a_file = told(replaced(config, DATA={"CACHE_PATH": f"{tmp_path}/file/cache"}))
    assert_names(below_a_file, "warning", "DATA.CACHE_PATH", f"{tmp_path}/file/cache")
    digits = open_sets(small_config(tmp_path, "DATA.CACHE=disk"))
    assert "which are in memory already" in told(sets=digits)
