"""Small files of each format: read right, or refused by name."""

import bz2
import contextlib
import gzip
import io
import json
import logging
import lzma
import struct
import sys
import tarfile
import time
import zipfile
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.each_case import each_case
from w2v.config import ConfigError, CorpusConfig, VocabConfig, load_config, save_config
from w2v.text import formats
from w2v.text.corpus import NoKnownWords, open_corpus
from w2v.text.encode import encode_files
from w2v.text.formats import CorpusError
from w2v.text.sources import locate
from w2v.text.splitting import tokenize_mode
from w2v.text.vocab import VocabError

RAW = 'The cat, it sat. Don\'t "stop"!\nA cat & dog\n'
WORDS = "the cat it sat don t stop a cat dog"
NAIVE = "naïve Mädchen, größer. Über\nça va, où\n"
NAIVE_WORDS = "naïve mädchen größer über ça va où"


def words(path, data_dir, **settings):
    """Return the words of a text in their order, and what its lines are."""
    settings = CorpusConfig(**settings)
    files = locate(str(path), data_dir, settings)
    settings = replace(settings, tokenize=tokenize_mode(files, settings)[0])
    vocab, blocks = encode_files(files, settings, VocabConfig(min_count=1), 2, data_dir)
    ids = [row for block in blocks for row in block.ids.tolist()]
    return " ".join(vocab.words[row] for row in ids)


def lines(*entries, end="\n"):
    return "".join(json.dumps(entry) + end for entry in entries).encode()


def zst(data):
    name = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    return pytest.importorskip(name).compress(data)


TEXTS = RAW.split("\n")[:2]
ENTRIES = [{"url": "http://a.b/c", "text": text, "n": 3, "meta": {"lang": "en"}} for text in TEXTS]
NESTED = {"version": "1.1", "data": [{"pages": [{"text": text} for text in TEXTS]}]}
CSV = b'id,text,label\n1,"The cat, it sat. Don\'t ""stop""!",pos\n2,A cat & dog,neg\n'
SPLIT_CSV = (
    b'id,text,label\r\n1,"The cat,\r\nit sat. Don\'t\n""stop"" a!",pos\r\n2,A cat & dog,neg\r\n'
)
TSV = b'1\tThe cat, it sat. Don\'t "stop"!\tpos\n2\t"A cat" & dog\tneg\n'
QUOTED_TSV = b'id\ttext\n1\t"The cat, it sat. Don\'t ""stop""!"\n2\tA cat & dog\n'
TOKENS = [["New", "York", "U.S.", "don't"], ["the", "U.S.", "los angeles"]]
TOKEN_WORDS = "New York U.S. don't the U.S. los_angeles"
SENTENCES = "the cat it sat on a mat a dog"
JSON_TEXT = lines(*ENTRIES)


@each_case(
    "name, content, settings, expected",
    [
        ("a.txt", RAW.encode(), {}, WORDS),
        ("a.txt", RAW.replace("\n", "\r\n").encode(), {}, WORDS),
        ("a.txt", b"\xef\xbb\xbf" + RAW.encode(), {}, WORDS),
        # Packed: known by the first bytes, whatever the name.
        *[
            (name, pack(RAW.encode()), {}, WORDS)
            for pack in (gzip.compress, bz2.compress, lzma.compress, zst)
            for name in ("a.txt", "a.gz", "a")
        ],
        ("a.gz", RAW.encode(), {}, WORDS),
        # JSON.
        *[(f"a.{ending}", JSON_TEXT, {}, WORDS) for ending in "json jsonl ndjson jl txt".split()],
        ("a.JSONL.GZ", gzip.compress(JSON_TEXT), {}, WORDS),
        ("a.json.gz", gzip.compress(JSON_TEXT), {}, WORDS),
        ("a.json", b"\xef\xbb\xbf" + JSON_TEXT.replace(b"\n", b"\r\n\r\n"), {}, WORDS),
        ("a.json", json.dumps(ENTRIES).encode(), {}, WORDS),
        ("a.txt", json.dumps(ENTRIES, indent=1).encode(), {}, WORDS),
        ("a.json", "\n".join(json.dumps(each, indent=1) for each in ENTRIES).encode(), {}, WORDS),
        ("a.json", json.dumps(TEXTS).encode(), {}, WORDS),
        ("a.json", json.dumps(NESTED).encode(), {"field": "data.pages.text"}, WORDS),
        ("a.json", json.dumps(NESTED, indent=2).encode(), {"field": "data.pages.text"}, WORDS),
        ("a.jsonl", lines(*[{"doc": {"body": t}} for t in TEXTS]), {"field": "doc.body"}, WORDS),
        ("a.jsonl", lines({"a.b": "c é"}, {"a.b": "\n\nthe\tx"}), {"field": "a.b"}, "c é the x"),
        ("a.json", lines(*TOKENS), {}, TOKEN_WORDS),
        ("a.json", lines(*[{"t": tokens} for tokens in TOKENS]), {"field": "t"}, TOKEN_WORDS),
        ("a.json", lines({"text": TOKENS}), {}, TOKEN_WORDS),
        ("a.jl", lines({"text": ["The cat, it sat on: a mat.", "A dog."]}), {}, SENTENCES),
        ("a.jl", lines({"text": ["The cat, it sat.", "A dog!"]}), {}, "the cat it sat a dog"),
        ("a.json", lines({"text": [12, 7]}, {"text": [7, 12]}), {}, "12 7 7 12"),
        # Tables.
        ("a.csv", CSV, {}, WORDS),
        ("a.txt", CSV, {}, WORDS),
        ("a.csv.bz2", bz2.compress(CSV), {}, WORDS),
        ("a.csv", b'\xef\xbb\xbftext,n\n"The cat, it sat.",1\n', {}, "the cat it sat"),
        (
            "a.csv",
            b'id;text\n1;"The cat, it sat."\n2;A dog, a cat\n',
            {},
            "the cat it sat a dog a cat",
        ),
        ("a.csv", CSV.replace(b'""', b'\\"'), {}, WORDS),
        ("a.csv", SPLIT_CSV, {}, "the cat it sat don t stop a a cat dog"),
        ("a.csv", b'text\n"The cat, it sat. Don\'t stop"\nA cat & dog\n', {}, WORDS),
        ("a.tsv", b"id\ttext\tlabel\n" + TSV, {}, WORDS),
        ("a.tsv", TSV, {"field": "2"}, WORDS),
        ("a.txt", TSV, {"field": "2"}, WORDS),
        ("a.tsv", QUOTED_TSV, {}, WORDS),
        # Encodings.
        *[("a.txt", NAIVE.encode(codec), {}, NAIVE_WORDS) for codec in ("utf-16", "utf-32")],
        ("a.txt", "\ufeff".encode("utf-16-be") + NAIVE.encode("utf-16-be"), {}, NAIVE_WORDS),
        *[
            ("a.txt", NAIVE.encode(codec), {"encoding": codec}, NAIVE_WORDS)
            for codec in ("latin-1", "cp1252", "utf-16-le", "UTF8")
        ],
        ("a.txt.gz", gzip.compress(NAIVE.encode("utf-16")), {}, NAIVE_WORDS),
        ("a.csv", f"n,text\n1,{TEXTS[1]}\n".encode("utf-16"), {}, "A cat & dog"),
        ("a.jsonl", '{"text": "é è, à."}\n'.encode("latin-1"), {"encoding": "latin-1"}, "é è à"),
        ("a.txt", "Привет, мир.\n".encode("cp1251"), {"encoding": "cp1251"}, "привет мир"),
        ("a.txt", "我 住 北京 。\n".encode("big5"), {"encoding": "big5"}, "我 住 北京 。"),
        # Text that looks like other formats.
        ("a.txt", b"12 7 33 4 5 6 7\n12 5\n", {}, "12 7 33 4 5 6 7 12 5"),
        ("a.txt", b"[1] The cat, sat.\n[2] A dog.\n", {}, "1 the cat sat 2 a dog"),
        ("a.txt", b'["Stop," she said.]\nA dog.\n', {}, "stop she said a dog"),
        ("a.txt", b"{{Infobox}} the cat.\n", {}, "infobox the cat"),
        ("a.txt", b"text, lines.\nThe text, it is.\n", {}, "text lines the text it is"),
        ("a.txt", b"<s> the <unk> </s>\n<s> a </s>\n", {}, "<s> the <unk> </s> <s> a </s>"),
        ("a.txt", "Orcé the\n".encode(), {}, "Orcé the"),
        ("a.txt", b"BMW PKW %PDF ID3 tags\n", {}, "BMW PKW %PDF ID3 tags"),
        ("a.xml", b"x y z\n", {}, "x y z"),
        ("a.txt", b"The cat, it\rsat, a\rdog\r", {}, "the cat it sat a dog"),
        ("a.jsonl", lines({"text": "a <mediawiki"}), {}, "a <mediawiki"),
        ("a.md", b"# Title\n\nThe cat, it sat.\n", {}, "the cat it sat"),
    ],
)
def test_what_is_text_is_read(tmp_path, name, content, settings, expected):
    (tmp_path / name).write_bytes(content)
    assert words(tmp_path / name, tmp_path, **settings) == expected


def zipped(**files):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        for name, text in files.items():
            file.writestr(name.replace("__", "/"), text)
    return content.getvalue()


def tarred():
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as file:
        file.addfile(tarfile.TarInfo("a.txt"))
    return content.getvalue()


HTML = "<!DOCTYPE html>\n<html><body><p>The cat &amp; dog&nbsp;sat</p></body></html>\n"


@each_case(
    "name, content, message",
    [
        ("a.txt", zipped(a="The cat"), "is a zip archive.*; unzip .*a.txt"),
        ("a.epub", zipped(mimetype="application/epub+zip"), "is an EPUB book.*; pandoc .*a.epub"),
        ("a.docx", zipped(word__document="x"), "an Office document.*; pandoc"),
        ("a.odt", zipped(mimetype="application/vnd.oasis.x"), "an OpenDocument file.*; pandoc"),
        ("a.tar", tarred(), "is a tar archive.*; tar xf"),
        ("a.tar.gz", gzip.compress(tarred()), "is a tar archive.*; tar xf"),
        ("a.7z", b"7z\xbc\xaf\x27\x1c\0\x04", "is a 7z archive"),
        ("a.pdf", b"%PDF-1.7\n%\xe2\xe3", "is a PDF document.*; pdftotext .*a.pdf"),
        ("a.txt", b"%PDF-1.7\n", "is a PDF document"),
        ("a.png", b"\x89PNG\r\n\x1a\n\0\0", "is an image"),
        ("a.jpg", b"\xff\xd8\xff\xe0\0\x10JFIF", "is an image"),
        ("a.mp3", b"ID3\x04\0\0", "looks binary"),
        ("a.rtf", rb"{\rtf1\ansi The cat}", "is an RTF document"),
        ("a.doc", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "is an Office document.*; soffice"),
        ("a.sqlite", b"SQLite format 3\0", "is an SQLite database.*; sqlite3"),
        ("a.pkl", b"\x80\x04\x95\0", "is a file of Python data.*JSON lines"),
        ("a.npy", b"\x93NUMPY\1\0", "is a file of Python data"),
        ("a.txt", HTML.encode(), "is HTML.*; pandoc .*html"),
        ("a.html", b"<!-- x -->\n<div class='a'><p>The cat</p></div>", "is HTML"),
        ("a.txt", b"The cat sat.\n<p>A dog</p> <b>and</b>\n", "is text with tags .</p>"),
        ("a.xml", b'<?xml version="1.0"?>\n<TEI><p>The cat</p></TEI>', "is XML.*; sed"),
        ("wiki_00", b'<doc id="1" title="A">\nThe cat.\n</doc>\n', "is XML.*; sed"),
        ("a.srt", b"1\n00:00:01,000 --> 00:00:02,000\nThe cat\n", "is a file of subtitles.*; sed"),
        ("a.vtt", b"WEBVTT\n\n00:01.000 --> 00:02.000\nThe cat\n", "is a file of subtitles"),
        ("a.toml", b"[model]\nwindow = 5\n", "is a config"),
        ("a.yaml", b"model:\n  window: 5\n", "is a config"),
        ("a.ini", b"[a]\nb=c\n", "is a config"),
        ("a.json", b'{"model": {"window": 5}}', "is a config"),
        ("a.json", b'{"name": "pkg", "version": "1"}', "no text in the field 'text' .it has name"),
        ("a.txt", NAIVE.encode("utf-16-le"), "a NUL byte; .*corpus.encoding=utf-16-le"),
        ("a.txt", NAIVE.encode("utf-16-be"), "a NUL byte; .*corpus.encoding=utf-16-be"),
        ("a.csv", CSV.replace(b"text", b"body"), "no column 'text' .its first line: id | body"),
        ("a.tsv", TSV, "no column 'text' .*corpus.field=NAME, or a number"),
        ("a.csv", b'id,"body\nof"\n1,a b\n', "no column 'text' .its first line: id | body of"),
        ("a.csv", CSV + b"3\n", r"line 4 .*\(it has 1 columns instead of 3\)"),
        ("a.csv", CSV + b"3,a, b,c\n", r"line 4 .*\(it has 4 columns instead of 3\)"),
        ("a.csv", CSV + b'3,"a b,c\n4,d,e\n', r"line 5 .*\(unexpected end of data\)"),
        ("a.json", json.dumps(TEXTS)[:-1].encode(), "entry 3 is not JSON"),
        ("a.txt", b"<!-- c -->\n" * 999 + b"the cat\n", "is text with tags"),
        ("a.txt", b"a&nbsp;cat &amp; dog\n", "is text with tags .&nbsp;"),
        ("a.vec", b"2 5\na .1 0.2 -0.3 1.5e-05 1.0 \n", "is a file of vectors.*; w2v nn"),
        ("glove.txt", b"the 0.1 0.2 -0.3 0.5 1.0\n", "is a file of vectors"),
        ("a.avro", b"Obj\x01\x04\x14avro", "is an Avro or ORC table"),
        ("a.json", b'[{"text": "a b"}, {"text": ', " entry 2 is not JSON"),
        ("a.json", b'{"model.window": 5}', "is a config"),
        ("a.jsonl", lines({"text": [{"a": 1}]}), "line 1 has no text in the field 'text'"),
    ],
)
def test_what_is_no_text_is_refused_by_name(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=rf"(?s){name}.*{message}") as error:
        words(tmp_path / name, tmp_path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    (tmp_path / "b.txt").write_bytes(b"more text\n")
    with pytest.raises(CorpusError, match=name):
        words(tmp_path, tmp_path / "data")


def test_a_folder_may_mix_formats(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_bytes(TEXTS[0].encode())
    (texts / "b.csv").write_bytes(CSV)
    (texts / "c.json.gz").write_bytes(gzip.compress(JSON_TEXT))
    (texts / "d.txt").write_bytes(TEXTS[1].encode("utf-16"))
    # No JSON: a quote that is left open, in one line or several, and a list before other text.
    (texts / "e.txt").write_bytes(b'["The cat sat')
    (texts / "f.txt").write_bytes(b'[["The cat sat\n')
    (texts / "g.txt").write_bytes(b'["The"] cat sat\n')
    (texts / "h.txt").write_bytes(b"\n" * formats.HEAD_BYTES + b"the dog")
    first, second = WORDS[: -len(" a cat dog")], "a cat dog" + 3 * " the cat sat" + " the dog"
    assert words(texts, tmp_path) == f"{first} {WORDS} {WORDS} {second}"
    started = time.process_time()
    assert formats.recognize(texts / "h.txt").kind == "text"
    assert time.process_time() - started < 1  # a pattern may read blanks once for each blank


def test_json_of_many_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "CHUNK", 50)
    monkeypatch.setattr(formats, "HEAD_BYTES", 100)
    texts = [f"word{n} " * (n % 40) + 'an "end" [1, {2}] é' for n in range(200)]
    for name, content in {
        "one line": json.dumps([{"text": text} for text in texts]),
        "pretty": json.dumps([{"id": 1, "text": text} for text in texts], indent=3),
        "strings": json.dumps(texts, ensure_ascii=False),
        "lines": lines(*[{"text": text} for text in texts]).decode(),
    }.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
        found = words(tmp_path / name, tmp_path, tokenize="whitespace")
        assert found == " ".join(" ".join(texts).split()), name


def test_entries_without_text_are_counted(tmp_path, caplog):
    entries = [{"text": "a b"}, {"title": "t"}, {"text": None}, {"text": "b c"}]
    (tmp_path / "a.jsonl").write_bytes(lines({"index": 1}, *entries))
    assert words(tmp_path / "a.jsonl", tmp_path) == "a b b c"
    assert "3 of 5 entries have no text in the field 'text', first line 1" in caplog.text
    (tmp_path / "a.json").write_bytes(lines({}, *entries))
    (tmp_path / "b.json").write_bytes(lines({"corpus": "a b"}, {"corpus": "b c"}))  # no config
    assert words(tmp_path / "a.json", tmp_path) == "a b b c"
    assert words(tmp_path / "b.json", tmp_path, field="corpus") == "a b b c"
    (tmp_path / "a.jsonl").write_bytes(lines({"index": 1}, {"index": 2}))
    with pytest.raises(CorpusError, match="line 1 has no text in the field 'text' .it has index"):
        words(tmp_path / "a.jsonl", tmp_path)


@each_case("kind", ["parquet", "arrow", "stream", "gz"])
def test_columns_of_parquet_and_arrow_are_read(tmp_path, kind):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import ipc, parquet

    columns = {"id": [1, 2, 3], "text": [*TEXTS, None], "tokens": [*TOKENS, []]}
    columns["nested"] = [{"text": text} for text in (*TEXTS, "")]
    table = pyarrow.table(columns)
    path = tmp_path / "a.txt"  # known by its first bytes
    if kind in ("parquet", "gz"):
        parquet.write_table(table, path)
    else:
        new = {"arrow": ipc.new_file, "stream": ipc.new_stream}[kind]
        with new(str(path), table.schema) as writer:
            writer.write_table(table)
    if kind == "gz":
        path.write_bytes(gzip.compress(path.read_bytes()))
    assert words(path, tmp_path) == WORDS
    assert words(path, tmp_path, field="tokens") == TOKEN_WORDS
    assert words(path, tmp_path, field="nested.text") == WORDS
    with pytest.raises(CorpusError, match=r"no column 'body' \(it has id: int64, text: string"):
        words(path, tmp_path, field="body")
    if kind in ("arrow", "stream"):  # a text that ends beyond the file
        first, end = len(TEXTS[0]), len("".join(TEXTS))
        sound, damaged = (struct.pack("<4i", 0, first, at, at) for at in (end, 1 << 30))
        assert sound in path.read_bytes()
        path.write_bytes(path.read_bytes().replace(sound, damaged))
        with pytest.raises(CorpusError, match="a.txt cannot be read .ArrowInvalid"):
            words(path, tmp_path)


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1\0\0PAR1")
    with pytest.raises(CorpusError, match=r"pip install pyarrow"):
        words(tmp_path / "a.parquet", tmp_path)


def test_a_hugging_face_dataset_on_disk_is_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"text": TEXTS})
    for split in ("train", "test"):
        folder = tmp_path / "dataset" / split
        folder.mkdir(parents=True)
        for name in ("data-00000-of-00001.arrow", "cache-1234.arrow"):
            with pyarrow.ipc.new_stream(str(folder / name), table.schema) as writer:
                writer.write_table(table)
        state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
        (folder / "state.json").write_text(json.dumps(state))
        (folder / "dataset_info.json").write_text('{"features": {}}')
        if split == "test":  # as in the cache of the datasets package
            (folder / "state.json").unlink()
            (folder / "cache-1234.arrow").unlink()
    (tmp_path / "dataset" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert words(tmp_path / "dataset" / "train", tmp_path) == WORDS
    assert words(tmp_path / "dataset", tmp_path) == f"{WORDS} {WORDS}"
    (tmp_path / "dataset" / "train" / "state.json").write_text("{}")
    with pytest.raises(CorpusError, match=r"train/state\.json cannot be read \(KeyError"):
        words(tmp_path / "dataset", tmp_path)


def test_a_remote_text_is_fetched_once(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    system = fsspec.filesystem("memory")
    system.pipe({"/texts/a.json": JSON_TEXT, "/texts/b.txt": RAW.encode()})
    try:
        for _ in range(2):
            assert words("memory://texts/a.json", tmp_path) == WORDS
        assert words("memory://texts", tmp_path) == f"{WORDS} {WORDS}"
    finally:
        system.rm("/texts", recursive=True)
    assert words("memory://texts/a.json", tmp_path) == WORDS
    with pytest.raises(CorpusError, match=r"memory://texts/c cannot be fetched \(FileNotFound"):
        locate("memory://texts/c", tmp_path)
    assert not [path for path in tmp_path.rglob("*.partial")]


@each_case("codec, text", [("latin-1", NAIVE), ("cp1251", "Привет, мир. Как дела?\n")])
def test_a_wrong_encoding_is_refused(tmp_path, codec, text):
    (tmp_path / "a.txt").write_bytes(("ok\n" + text * 20).encode(codec))
    message = "words are not UTF-8, first in line 2; set corpus.encoding="
    with pytest.raises(CorpusError, match=rf"a\.txt: \d+ of \d+ {message}"):
        words(tmp_path / "a.txt", tmp_path)


def test_the_probable_encoding_is_named(tmp_path):
    pytest.importorskip("charset_normalizer")
    russian = "Привет, мир. Как твои дела сегодня?\n"
    texts = {"cp1251": russian, "koi8_r": russian, "cp1252": NAIVE, "gb18030": "今天 天气 很好。\n"}
    for codec, text in texts.items():
        (tmp_path / "a.txt").write_bytes((text * 20).encode(codec))
        with pytest.raises(CorpusError, match=f"set corpus.encoding={codec} "):
            words(tmp_path / "a.txt", tmp_path)


def test_few_broken_words_are_a_warning(tmp_path, caplog):
    text = b"some words of a text\n" * 990 + "some \ufffd of a text\n".encode() * 10
    (tmp_path / "a.txt").write_bytes(text + b"M\xe4dchen here\n" * 5)
    with caplog.at_level(logging.WARNING, "w2v"):
        assert words(tmp_path / "a.txt", tmp_path).endswith("M\ufffddchen here")
    assert "5 bytes are not UTF-8, first in" in caplog.text and "line 1001;" in caplog.text
    (tmp_path / "a.txt").write_bytes(text + b"M\xe4dchen here\n" * 6)
    with pytest.raises(CorpusError, match="6 of 5,012 words are not UTF-8"):
        words(tmp_path / "a.txt", tmp_path)
    (tmp_path / "a.txt").write_bytes("the cat".encode("utf-16")[:-1])
    with pytest.raises(CorpusError, match="1 of 2 words are not UTF-16, first in line 1"):
        words(tmp_path / "a.txt", tmp_path)


SPACELESS = {
    "chinese": "我来到北京清华大学。他来到了网易杭研大厦。今天天气很好。我们一起去公园散步吧。\n",
    "japanese": "東京都に住んでいます。カタカナの言葉を勉強した。明日は天気がいいでしょう。\n",
    "thai": "ภาษาไทยเป็นภาษาที่มีระดับเสียงของคำแน่นอน\n",
    "lao": "ພາສາລາວເປັນພາສາທີ່ມີລະບົບສຽງ\n",
    "khmer": "ភាសាខ្មែរគឺជាភាសាកំណើតរបស់ជនជាតិខ្មែរ\n",
    "burmese": "မြန်မာဘာသာစကားသည်မြန်မာနိုင်ငံ၏ရုံးသုံးဘာသာစကားဖြစ်သည်\n",
}


@each_case("language", SPACELESS)
def test_text_without_spaces_is_refused_with_the_remedy(tmp_path, language):
    text = SPACELESS[language] * 3
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    (tmp_path / "b.txt").write_text("The cat, it sat.\n" + text, encoding="utf-8")
    remedy = r"without spaces; set corpus.tokenize=icu .*or module:function"
    for name in ("a.txt", "b.txt"):
        for mode in ("auto", "words"):
            with pytest.raises(CorpusError, match=remedy):
                words(tmp_path / name, tmp_path, tokenize=mode)
    pytest.importorskip("icu4py")
    found = words(tmp_path / "a.txt", tmp_path, tokenize="icu").split()
    assert 1.5 < len(text) / len(found) < 8 and "。" not in found
    # As split by another tokenizer.
    for number, space in enumerate((" ", "\u200b")):
        path = tmp_path / f"split{number}.txt"
        path.write_text(space.join(found) + " 。\n", encoding="utf-8")
        assert words(path, tmp_path) == " ".join(found) + " 。"


@each_case(
    "text",
    ["한국어는 띄어쓰기가 있다. 고양이, 개.\n", "Tōkyō (東京都) is a city, 都市 of Japan.\n" * 9],
)
def test_other_scripts_are_not_refused(tmp_path, text):
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    assert len(words(tmp_path / "a.txt", tmp_path).split()) > 4


def test_icu_without_its_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "icu4py.breakers", None)
    (tmp_path / "a.txt").write_text("a b\n")
    with pytest.raises(CorpusError, match=r"pip install icu4py"):
        words(tmp_path / "a.txt", tmp_path, tokenize="icu")


MODULE = """
def pairs(line):
    return [line[n:n + 2] for n in range(0, len(line), 2)]
def text(line):
    return line.upper()
def fails(line):
    return 1 / 0
NUMBER = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "w2v_pairs.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "w2v_pairs"
    sys.modules.pop("w2v_pairs", None)


def test_a_function_splits_lines(tmp_path, module):
    (tmp_path / "w2v_broken.py").write_text("1 / 0")
    (tmp_path / "a.txt").write_text("abcd ef\nghij\n")
    assert words(tmp_path / "a.txt", tmp_path, tokenize=f"{module}:pairs") == "ab cd e f gh ij"
    assert words(tmp_path / "a.txt", tmp_path, tokenize=f"{module}:text") == "ABCD EF GHIJ"[:7]
    (tmp_path / "b.jsonl").write_bytes(lines({"text": "abcd"}, {"text": "ef\nghij"}))
    assert words(tmp_path / "b.jsonl", tmp_path, tokenize=f"{module}:pairs") == "ab cd gh ij"
    for name, message in {
        "w2v_nothing:words": "is not found .No module named 'w2v_nothing'",
        f"{module}:nothing": "is not found .*has no attribute 'nothing'",
        f"{module}:NUMBER": "is not a function",
        "w2v_broken:words": r"w2v_broken:words fails \(ZeroDivisionError: .*; correct it",
        f"{module}:fails": r"fails at line 1 of .*a\.txt \(ZeroDivisionError",
    }.items():
        with pytest.raises(CorpusError, match=message):
            words(tmp_path / "a.txt", tmp_path, tokenize=name)


def test_a_changed_function_reads_the_text_again(tmp_path, module):
    (tmp_path / "a.txt").write_text("abcd\n" * 3)
    paths = [f"corpus.path={tmp_path}/a.txt", f"corpus.data_dir={tmp_path}/data"]
    config = load_config([], [*paths, "vocab.min_count=1", f"corpus.tokenize={module}:pairs"])
    assert open_corpus(config)[0].words == ["ab", "cd"]
    del sys.modules[module]
    (tmp_path / "w2v_pairs.py").write_text("def pairs(line): return list(line)")
    assert open_corpus(config)[0].words == ["a", "b", "c", "d"]


def test_marks_and_emoji(tmp_path):
    text = "I ❤️ you, 😀😀 e\u0301! 1️⃣ \u0301 (a\ufe0f) 👨‍👩‍👧 👍🏽 🇩🇪🇫🇷 हिन्दी.\n"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    plain = "i you e\u0301 1 a\ufe0f हिन्दी"  # and no joiner
    assert words(tmp_path / "a.txt", tmp_path, tokenize="words") == plain
    emoji = "i ❤ you 😀 😀 e\u0301 1 a 👨‍👩‍👧 👍🏽 🇩🇪 🇫🇷 हिन्दी"
    assert words(tmp_path / "a.txt", tmp_path, tokenize="words", emoji=True) == emoji
    (tmp_path / "b.txt").write_text("می\u200cرویم ශ්\u200dරී \u200d ok😀😀 :)\n", encoding="utf-8")
    plain = "می\u200cرویم ශ්\u200dරී"
    assert words(tmp_path / "b.txt", tmp_path, tokenize="words") == f"{plain} ok"
    spaced = f"{plain} \u200d ok 😀 😀 :)"
    assert words(tmp_path / "b.txt", tmp_path, tokenize="whitespace", emoji=True) == spaced


def test_two_texts_one_with_a_colon_in_its_name(tmp_path):
    from w2v.api.train import sort_settings

    for name in ("a:b.txt", "c d.txt", "[x].txt", "e.csv"):
        content = "text\n" if name == "e.csv" else ""
        (tmp_path / name).write_text(f"{content}{name[1]}x word\n")
        given = [str(tmp_path / "a:b.txt"), str(tmp_path / name)]
        for texts in ([given[1]], given):
            files, assignments = sort_settings(texts)
            config = load_config(
                files, [*assignments, f"corpus.data_dir={tmp_path}", "vocab.min_count=1"]
            )
            assert config.corpus.path == tuple(texts)
            assert len(open_corpus(config)[1].offsets) == len(texts) + 1


def test_settings_of_texts_are_checked_and_saved(tmp_path):
    for text, paths in {
        "a:b.txt": ("a:b.txt",),
        "[a.txt, 'b, c.csv']": ("a.txt", "b, c.csv"),
        "[x].txt": ("[x].txt",),
        "'[x]'": ("[x]",),
    }.items():
        config = load_config([], [f"corpus.path={text}", "corpus.encoding=Latin-1"])
        assert config.corpus.path == paths
        save_config(config, tmp_path / "saved.yaml")
        assert load_config([tmp_path / "saved.yaml"]) == config
    for setting, message in {
        "corpus.path=[]": r"\[\] .* is not a text, or a list such as \[a.txt, b.txt\]",
        "corpus.path=[a, [b]]": "is not a text, or a list",
        "corpus.encoding=rot13": "corpus.encoding=rot13 is not a text encoding",
        "corpus.encoding=utf-99": "corpus.encoding=utf-99 is not a text encoding",
        "corpus.tokenize=word": "one of auto, .* or module:function; did you mean words",
        "corpus.tokenize=a:b:c": "is not one of",
        "corpus.emoji=maybe": "is not true or false",
    }.items():
        with pytest.raises(ConfigError, match=message):
            load_config([], [setting])


FIRST_BYTES = [b"", RAW.encode(), b"\xff\xfe", b"id,text\n1,", b"text\tid\n", b"<p>", b"<mediawiki"]
FIRST_BYTES += [b'{"text": "', b'[{"text": "', b'["', b'{"text": ["a", ', b'{"text": 1}\n', b'\\"']
FIRST_BYTES += [b"\x1f\x8b\x08", b"\xfd7zXZ\0", b"BZh91AY&SY", b"\x28\xb5\x2f\xfd", b"PK\3\4"]
FIRST_BYTES += [b"PAR1", b"ARROW1\0\0", b"\xff\xff\xff\xff\1\0\0\0"]


@given(
    st.sampled_from(FIRST_BYTES),
    st.binary(max_size=100) | st.text('"\\{}[]:,\t\n <a&é中', max_size=60).map(str.encode),
    st.sampled_from(["txt", "json", "jsonl", "csv", "tsv"]),
    st.sampled_from(["text", "1", "a.b"]),
)
def test_any_bytes_are_read_or_refused(tmp_path_factory, first, content, ending, field):
    folder = tmp_path_factory.mktemp("any")
    (folder / f"a.{ending}").write_bytes(first + content)
    with contextlib.suppress(CorpusError, VocabError, NoKnownWords):
        words(folder / f"a.{ending}", folder, field=field)
