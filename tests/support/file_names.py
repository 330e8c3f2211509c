"""Strategies that draw file and folder names as users have them: accents in both forms, spaces, quotes and commas."""

from unicodedata import normalize

from hypothesis import strategies as st

# Letters with accents, and the characters that lists, CSV files, shells or URLs treat specially.
CHARACTERS = "aB7 _-üéÅ가ﬁ😀'\",;|\\=#%&.\t\r\n"
IN_LINES = CHARACTERS.translate(dict.fromkeys(map(ord, "\t\r\n")))


def names(characters: str = CHARACTERS, most: int = 6) -> st.SearchStrategy[str]:
    """Draw names in composed form that are neither hidden nor blank, without spaces at the ends."""
    texts = st.text(characters, min_size=1, max_size=most).map(lambda text: normalize("NFC", text.strip()))
    return texts.filter(lambda text: text and not text.startswith("."))


def in_any_form(text: str) -> st.SearchStrategy[str]:
    """Draw a Unicode form of a name. A Mac writes umlauts as two characters."""
    return st.sampled_from(["NFC", "NFD"]).map(lambda form: normalize(form, text))
