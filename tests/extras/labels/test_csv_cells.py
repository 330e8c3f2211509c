"""Labels in drawn CSV files are changed and nothing else, and names are found again in the tables of a run."""

import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from configs.schema import Config
from engine.record.saved_files import read_table
from extras.labels.csv_cells import CsvFile
from extras.labels.data import cell_of
from tests.support.configs import replaced
from tests.support.csv_files import rows_in, written
from tests.support.file_names import names
from tests.support.properties import examples

LABELS = st.one_of(names(), st.sampled_from(['"a" b', "a,b;c\td", "two\nlines"]))
ROWS = st.lists(st.tuples(names(), names(), names()), min_size=1, max_size=5)


@given(ROWS, st.permutations(range(3)), st.data())
@examples(80)
def test_changed_label_is_read_back_and_all_else_stays(tmp_path_factory, rows, order, draw):
    header, config = ("image_path", "target", "note; 2"), replaced(Config(), DATA={"GROUP_BY": "note; 2"})
    content = draw.draw(written([[row[place] for place in order] for row in (header, *rows)]))
    changes = draw.draw(st.dictionaries(st.integers(0, len(rows) - 1), LABELS, min_size=1))
    file = Path(tmp_path_factory.getbasetemp(), "list.csv")
    file.write_bytes(content)
    table = CsvFile.read(file, config)
    assert table.with_labels({}) == content
    changed = rows_in(table.with_labels(changes), config)
    assert changed == [(path, changes.get(number, label), note) for number, (path, label, note) in enumerate(rows)]


@given(st.binary(max_size=5).map(os.fsdecode), names())
@examples(60)
def test_cells_of_predictions_csv_are_the_cells_that_are_looked_up(tmp_path_factory, name, label):
    from extras.report.image_tables import write_table

    file = Path(tmp_path_factory.getbasetemp(), "predictions.csv")
    write_table(file, ("image", "label"), [(name, label)])
    assert read_table(file) == [{"image": cell_of(name), "label": cell_of(label)}]
