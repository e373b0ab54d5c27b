import codecs
import gzip

import pytest

from jaxrl_post.jsonl import BadRowError, gather
from jaxrl_post.tables import Layout, read_table

GOOD = b'{"q": "1+1", "n": 2}\n'


@pytest.fixture
def read(tmp_path):
    def read(content: bytes, **options):
        path = tmp_path / "rows.jsonl"
        path.write_bytes(content)
        layout = Layout(("q", "n"), lambda row: [dict(row)])
        return read_table(path, [layout], **options)

    return read


def test_rows_keep_their_other_fields(read):
    rows, report = read(
        b'\n{"q": "a", "n": 1, "x": null}\r\n  \n{"q": "\xc3\xa9", "n": 2}'
    )
    assert rows == [{"q": "a", "n": 1, "x": None}, {"q": "é", "n": 2}]
    assert (report.num_rows, report.num_bad, report.first_bad) == (2, 0, ())


def test_a_byte_order_mark_is_ignored_at_the_start_only(read):
    rows, _ = read(codecs.BOM_UTF8 + GOOD)
    assert rows[0]["n"] == 2
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: not JSON"):
        read(GOOD + codecs.BOM_UTF8 + GOOD)


def test_line_separators_of_unicode_do_not_end_a_line(read):
    rows, _ = read('{"q": "a\u2028b\x85c", "n": 1}\n'.encode())
    assert rows[0]["q"] == "a\u2028b\x85c"


BAD = [
    (b'{"q": "a", "n": 1', "not JSON: Expecting ',' delimiter at column 18"),
    (b'{"q": "a", "n": 1} {"q"', "not JSON: Extra data at column 20"),
    (b'{"q": "a\xff", "n": 1}', r"not UTF-8 at byte 8 of the line \(invalid start"),
    (b'["q", "n"]', "must be a JSON object, got list"),
    (b'{"q": "a"}', r"no field 'n', which line 1 has \(fields: 'q'\)"),
    (b"{}", r"no field 'q', which line 1 has \(fields: none\)"),
    (b'{"q": "a", "n": NaN}', "NaN is not JSON"),
    (b'{"q": "a", "n": 1, "n": 2}', "key 'n' appears twice"),
    (b'{"q": "a", "n": ' + b"1" * 5000 + b"}", "not JSON that can be read: Exceeds"),
    (b"[" * 200_000, r"not JSON that can be read: brackets .* deep at"),
]


@pytest.mark.parametrize(("row", "reason"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_a_bad_row_fails_with_its_line_or_is_skipped_and_listed(read, row, reason):
    content = GOOD + b"\n" + row + b"\n" + GOOD
    with pytest.raises(
        ValueError,
        match=rf"rows\.jsonl:3: {reason}.*on_bad_row='skip' \(on the "
        r"command line --data.on-bad-row skip\)",
    ):
        read(content)
    rows, report = read(content, on_bad_row="skip")
    assert len(rows) == 2
    (bad,) = report.first_bad
    assert (bad.line, report.num_bad) == (3, 1)


def test_utf16_is_named_as_what_it_is_not(read):
    with pytest.raises(ValueError, match=r":1: not UTF-8 at byte 0"):
        read('{"q": "a", "n": 1}'.encode("utf-16"))


def test_the_report_lists_the_first_few(read):
    _, report = read(b"x\n" * 7 + GOOD, on_bad_row="skip")
    assert (report.num_rows, report.num_bad) == (1, 7)
    assert [bad.line for bad in report.first_bad] == [1, 2, 3, 4, 5]
    text = str(report).splitlines()
    assert text[0].endswith("rows.jsonl: 1 rows read, 7 skipped")
    assert text[1].endswith("rows.jsonl:1: not JSON: Expecting value at column 1")
    assert text[-1] == "  and 2 more"


@pytest.mark.parametrize("content", [b"", b"\n \n", codecs.BOM_UTF8])
def test_an_empty_file_is_an_error(read, content):
    with pytest.raises(
        ValueError, match=r"rows\.jsonl: empty data set, the file has no"
    ):
        read(content, on_bad_row="skip")


def test_skipping_every_row_is_an_error(read):
    with pytest.raises(
        ValueError, match=r"(?s)every row is bad:\n.*0 rows read, 2 skip"
    ):
        read(b"x\ny\n", on_bad_row="skip")


def test_an_absent_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.jsonl"):
        read_table(tmp_path / "absent.jsonl", [])


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"PAR1\x15\x04", r"Parquet\. Rename the file, so that it ends in \.parquet"),
        (gzip.compress(GOOD, mtime=0), r"data that gzip compressed\. Decompress it"),
    ],
    ids=["parquet", "gzip"],
)
def test_a_file_of_another_kind_is_named_as_what_it_is(read, content, kind):
    with pytest.raises(ValueError, match=rf"rows\.jsonl: must hold .*; got {kind}"):
        read(content)


def test_a_row_may_hold_any_number_of_items():
    def parse(line, row):
        if row < 0:
            raise BadRowError("below zero")
        return [line] * row

    rows = [(1, 0), (3, 2), (4, -1), (7, 1)]
    items, report = gather("rows", rows, parse, on_bad_row="skip")
    assert items == [3, 3, 7]
    assert (report.num_rows, report.num_unused, report.num_bad) == (3, 1, 1)
    assert str(report).splitlines() == [
        "rows: 3 rows read (1 of them unused), 1 skipped",
        "  rows:4: below zero",
    ]


def test_only_what_says_that_a_row_is_bad_makes_it_bad():
    with pytest.raises(ZeroDivisionError):
        gather("rows", [(1, 0)], lambda line, row: [line // row], on_bad_row="skip")
