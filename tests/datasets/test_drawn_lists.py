"""Drawn lists and CSV files: names and labels are read as they were written, in every form of the file."""

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from configs.schema import Config
from datasets.sources.imagenet import read_list_file
from tests.support.configs import replaced
from tests.support.csv_files import LINE_ENDS, rows_in, written
from tests.support.file_names import IN_LINES, names
from tests.support.properties import examples

TITLES = st.sampled_from(["note", 'two\n"lines"', "a;b,c"])  # of a further column
HIDDEN = st.sampled_from(["", "", ".", "./", ".hidden/"])


@st.composite
def paths(draw, characters: str | None = None) -> str:
    """Draw a path in a list, where names may be hidden and folders may be called "."."""
    name = names() if characters is None else names(characters)
    return draw(HIDDEN) + "/".join(draw(st.lists(name, min_size=1, max_size=2)))


@given(st.lists(st.tuples(paths(), names(), names(), names()), min_size=1, max_size=5), TITLES, st.data())
@examples(80)
def test_csv_file_is_read_as_written_in_every_form(rows, title, draw):
    header = ("image_path", "target", "person", title)
    order = draw.draw(st.permutations(range(4)))
    content = draw.draw(written([[row[place] for place in order] for row in (header, *rows)]))
    assert rows_in(content, replaced(Config(), DATA={"GROUP_BY": "person"})) == [row[:3] for row in rows]


@given(
    st.lists(st.tuples(paths(IN_LINES), st.integers(0, 999)), min_size=1, max_size=5),
    st.sampled_from(LINE_ENDS),
    st.sampled_from(["utf-8", "utf-8-sig"]),
    st.sampled_from([" ", "\t", "  "]),
    st.sampled_from(["", "\n", " \n\n"]),
)
@examples(60)
def test_list_file_is_read_as_written_with_any_line_end(rows, line_end, encoding, space, end):
    text = line_end.join(f"{path}{space}{label}" for path, label in rows) + end.replace("\n", line_end)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "train_list.txt")
        file.write_bytes(text.encode(encoding))
        found = []
        read_list_file(file, found.append)
    (of_file,) = found
    assert [*zip(of_file.paths, of_file.labels, strict=True)] == [(path, str(label)) for path, label in rows]
