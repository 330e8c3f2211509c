"""-check says whether a cache is there, or has room."""

from datasets import load_image_sets
from engine.check.quick_checks import OK, WARN, Finding
from extras.cache import CacheProgress, cache_image_sets
from extras.cache.check import check_cache
from tests.engine.check.small_photos import sets_of
from tests.support.configs import replaced, small_config


def test_a_cache_is_there_will_be_made_or_cannot_be(photos, tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    config, *sets = sets_of(photos, "DATA.CACHE=disk", f"DATA.CACHE_PATH={folder}")

    def found(given=config, sets=sets) -> Finding:
        return check_cache(given, dict(zip(("training", "validation"), sets, strict=True)))

    before = found()
    assert before.verdict == OK and not folder.exists()
    assert "training images: about 1 MiB will be written to" in before.text and "iB are free" in before.text
    with monkeypatch.context() as patch:
        patch.setattr("extras.cache.check.free_bytes", lambda place: 100)
        patch.setattr("extras.cache.check.estimate_bytes", lambda *given: 60)  # of each of the two parts
        assert found().verdict == WARN and "DATA.CACHE=256" in found().remedy
    cache_image_sets(config, sets, CacheProgress(print, print))
    after = found()
    assert after.verdict == OK and f"training images: 1 MiB in {folder}" in after.text and "will be" not in after.text
    (index,) = folder.glob("*training*.index")
    index.write_bytes(b"")
    assert str(index) in found().text and "training images: about" in found().text
    (tmp_path / "file").write_text("")
    below_a_file = found(replaced(config, DATA={"CACHE_PATH": f"{tmp_path}/file/cache"}))
    assert below_a_file.verdict == WARN and "DATA.CACHE_PATH" in below_a_file.remedy
    digits = load_image_sets(small_config(tmp_path, "DATA.CACHE=disk"))
    assert "none of the training images, which are in memory already" in found(sets=digits).text
