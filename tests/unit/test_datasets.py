"""Question files and judged word pairs are read as gensim reads them."""

import pytest

from w2v.vectors.datasets import EvaluationError, judged_pairs, read_questions


def test_google_questions_are_read_by_section():
    sections = read_questions(None)
    assert len(sections) == 14 and sum(len(questions) for _, questions in sections) == 19_544
    assert sections[0] == ("capital-common-countries", sections[0][1])
    assert sections[0][1][0] == ["ATHENS", "GREECE", "BAGHDAD", "IRAQ"]


def test_lines_of_other_than_four_words_are_skipped(tmp_path):
    (tmp_path / "q.txt").write_text(": s\na b c\na b c D\n\na b c d e\n")
    assert read_questions(tmp_path / "q.txt") == [("s", [["A", "B", "C", "D"]])]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"a b c d\n", "line 1: a question before the first section; begin"),
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
