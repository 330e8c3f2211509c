"""The variants of scripts/maintenance/run_hashes.py train with the settings in their names."""

import pytest

from configs.load import load
from scripts.maintenance.run_hashes import VARIANTS, words_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", VARIANTS)
def test_every_setting_in_a_run_hash_variant_takes_effect(name, tmp_path):
    assert load(words_of(name, tmp_path)).notes == []


def test_no_two_run_hash_variants_are_the_same():
    assert len(set(VARIANTS.values())) == 14
