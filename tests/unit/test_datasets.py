"""Question files and judged word pairs are read as gensim reads them."""

import gzip
import lzma

import pytest

from tests.support.each_case import each_case
from w2v.vectors.datasets import EvaluationError, judged_pairs, read_questions


def test_google_questions_are_read_by_section():
    sections = read_questions(None)
    assert len(sections) == 14 and sum(len(questions) for _, questions in sections) == 19_544
    assert sections[0] == ("capital-common-countries", sections[0][1])
    assert sections[0][1][0] == ["ATHENS", "GREECE", "BAGHDAD", "IRAQ"]


def test_lines_of_other_than_four_words_are_skipped(tmp_path):
    (tmp_path / "q.txt").write_text(": s\na b c\na b c D\n\na b c d e\n")
    assert read_questions(tmp_path / "q.txt") == [("s", [["A", "B", "C", "D"]])]


def test_questions_without_a_section_are_in_one_named_after_the_file(tmp_path):
    path = tmp_path / "msr.txt.xz"
    path.write_bytes(lzma.compress(b"a b c d\n: s\ne f g h\n"))
    assert read_questions(path) == [("msr", [["A", "B", "C", "D"]]), ("s", [["E", "F", "G", "H"]])]


@pytest.mark.parametrize(("text", "name"), [(": s\na b c d\n", "s"), ("a b c d\n", "q")])
def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path, text, name):
    (tmp_path / "q.txt").write_text(text, encoding="utf-8-sig")
    assert read_questions(tmp_path / "q.txt") == [(name, [["A", "B", "C", "D"]])]


@each_case(
    "text",
    [
        "cat\tdog\t8.5\nsun\tmoon\t.25\n",
        "word 1,word 2,mean,deviation\ncat,dog,8.5,1.2\nsun,moon,0.25,3\n",
        "# by hand\ncat dog N 8.5 SYNONYMS\nsun moon N 0.25 NONE\n",
        "cat\tdog\t8.5e0\nsun\tmoon\t+2.5E-01\n",
        "\ufeffcat;dog;8.5\nsun;moon;0.25\n",
    ],
)
def test_pairs_of_a_file_have_their_first_number(tmp_path, text):
    for path, content in (
        (tmp_path / "pairs.txt", text.encode()),
        (tmp_path / "pairs.csv.gz", gzip.compress(text.encode())),
    ):
        path.write_bytes(content)
        assert judged_pairs(path) == [("CAT", "DOG", 8.5), ("SUN", "MOON", 0.25)]


def test_pairs_files_without_a_pair_are_refused(tmp_path):
    (tmp_path / "pairs.txt").write_text("a b\n")
    with pytest.raises(EvaluationError, match="holds no pair of words; write"):
        judged_pairs(tmp_path / "pairs.txt")


@each_case(
    ("text", "message"),
    [
        (b": s\na b c\n", "holds no question; write"),
        (b"", "holds no question; write"),
        (b": s\n\xff", "cannot be read .*; name a UTF-8 text file"),
    ],
)
def test_bad_question_files_are_refused(tmp_path, text, message):
    path = tmp_path / "q.txt"
    path.write_bytes(text)
    with pytest.raises(EvaluationError, match=message):
        read_questions(path)


@pytest.mark.parametrize(("name", "pairs"), [("wordsim353", 353), ("simlex999", 999)])
def test_judged_pairs_are_whole(name, pairs):
    judged = judged_pairs(name)
    assert len(judged) == pairs and all(0 <= score <= 10 for _, _, score in judged)
