"""The report is safe and shows all runs."""

import html
import json
import re
import shutil
import subprocess
from base64 import b64decode
from html.parser import HTMLParser
from importlib.metadata import PackageNotFoundError
from statistics import mean
from unittest import mock

import numpy as np
import pytest
from sklearn.preprocessing import normalize

from tests.support.planted import kv_of
from tests.support.runs import scores_of, write_run
from w2v.vectors import export, query, report, runs

ATTACK = "</script><script>alert(1)</script>"
BROWSER = shutil.which("chromium")


class Page(HTMLParser):
    """Elements, attributes and text of a page whose elements are closed."""

    VOID = ("meta", "link", "input", "br", "img")

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], {}
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert tag == self.open.pop()

    def handle_data(self, data):
        self.text.setdefault(self.open[-1] if self.open else "", []).append(data)


@pytest.fixture(autouse=True)
def script(tmp_path_factory, monkeypatch):
    """A small script in place of plotly's, which need not be installed."""
    file = tmp_path_factory.mktemp("plotly") / "plotly.min.js"
    file.write_text("// plotly")
    found = mock.Mock(locate_file=lambda _: file)
    monkeypatch.setattr(report, "distribution", lambda _: found)


WORDS = [f"word{number}" for number in range(40)]
WORDS[3] = ATTACK
VECTORS = np.random.default_rng(1).standard_normal((40, 8)).astype(np.float32)


def make_page(folder):
    """Write a report of a finished run with vectors, and of an unfinished one."""
    lines = [
        {"words": n, "seconds": n, "loss": 3 / n, "words_per_s": 9, "lr": 0.1} for n in (1, 2, 3)
    ]
    scores = scores_of(0.25) | {"words": 3, "seconds": 3}
    scores["analogies"]["answers"] = "1 0 nan 0 0"
    done = write_run(folder / "a<b>", scores, "optimizer.lr=0.5", metrics=lines)
    write_run(folder / "running", None, "optimizer.lr=0.25", metrics=lines)
    export.save(kv_of(WORDS, VECTORS), done, ["kv"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "MAP_WORDS", 30)
        return report.write([folder], folder / "page.html")


@pytest.fixture
def page(tmp_path):
    return make_page(tmp_path / "runs")


def figure_of(page):
    """Return the figure of a page that plotly draws."""
    parsed = Page(page.read_text(encoding="utf-8"))
    return json.loads(parsed.text["script"][0])


def words_of(page):
    """Return what the script beside a page passes on."""
    text = page.with_suffix(".js").read_text(encoding="utf-8")
    return json.loads(re.fullmatch(r"showWords\((.*)\);\n", text, re.DOTALL)[1])


def test_a_run_of_few_words_has_no_map(tmp_path):
    run = write_run(tmp_path / "run", metrics=[{"words": 1, "seconds": 1, "loss": 3}])
    export.save(kv_of(["a", "b"], np.ones((2, 8), np.float32)), run, ["kv"])
    page = report.write([run], tmp_path / "page.html")
    assert words_of(page)["words"] == "a\nb" and words_of(page)["x"] == []


def test_a_page_loads_only_the_files_beside_it(page):
    text = page.read_text(encoding="utf-8")
    parsed = Page(text)
    assert not {"link", "iframe", "a", "base", "img"} & set(parsed.tags)
    assert not {"href", "srcset", "onclick"} & {name for name, _ in parsed.attributes}
    loaded = [value for name, value in parsed.attributes if name == "src"]
    assert loaded == ["plotly.min.js", "page.js"]
    assert all((page.parent / name).exists() for name in loaded)
    assert not re.search(r"https?:|//\w|@import|url\(|fetch\(|import\(|innerHTML", text)


def test_words_and_names_are_escaped(page):
    text = page.read_text(encoding="utf-8")
    assert ATTACK not in text and "a<b>" not in text
    assert Page(text).tags.count("script") == 4
    found = words_of(page)
    assert found["words"].split("\n") == WORDS and found["run"].endswith("a<b>")


def test_names_of_runs_are_text_to_plotly(tmp_path):
    for number in range(2):
        lines = [{"words": n, "seconds": n, "loss": 2.0} for n in (1, 2)]
        write_run(tmp_path / str(number), None, f"corpus.path=<b>{number}", metrics=lines)
    traces = figure_of(report.write([tmp_path]))["data"]
    assert {trace["name"] for trace in traces} == {f"Adam path &#60;b&#62;{n}" for n in (0, 1)}


def test_page_of_a_vectors_file_shows_its_words_alone(page, tmp_path):
    file = tmp_path / "a.kv"
    kv = kv_of(WORDS, VECTORS)
    kv.vectors = np.asfortranarray(kv.vectors)  # as others may have saved them
    kv.save(str(file), separately=["vectors"])
    written = report.write([file])
    found, of_run = words_of(written), words_of(page)
    assert (
        written == tmp_path / "a.kv.html" and "<h1>Word vectors of a.kv</h1>" in written.read_text()
    )
    assert (found["words"], found["bytes"]) == (of_run["words"], of_run["bytes"])
    assert len(found["x"]) == 40 and 'id="curves"' not in written.read_text()
    with pytest.raises(report.ReportError, match="a.kv is a file of vectors"):
        report.write([file, page.parent])


def test_all_words_are_found_with_vectors_places_and_groups(page, monkeypatch):
    found = words_of(page)
    assert np.shape((found["x"], found["y"])) == (2, 30)
    assert len(found["groups"]) == 30 and max(found["groups"]) < len(report.COLORS)
    vectors = np.frombuffer(b64decode(found["bytes"]), np.int8).reshape(40, found["dim"])
    vectors = normalize(vectors.astype(np.float32))
    for word in (0, 35):  # one is not on the map
        near = query.combination(kv_of(WORDS, VECTORS), [WORDS[word]], 5)
        cosines = vectors @ vectors[word]
        assert [WORDS[row] for row in np.argsort(-cosines)[1:6]] == [name for name, _ in near]
        assert np.sort(cosines)[-6:-1][::-1] == pytest.approx([c for _, c in near], abs=0.01)
    monkeypatch.setattr(report, "NEIGHBOR_BYTES", 80)
    compared = runs.Comparison.of([runs.read(path) for path in runs.find_all([page.parent])])
    placeless = words_of(report.write_page(compared, page, with_map=False))
    found = words_of(report.write([page.parent], page))
    places = {"x": [], "y": [], "groups": []}
    assert placeless == found | places != found
    assert found["words"].split("\n") == WORDS and len(b64decode(found["bytes"])) == 80


def test_page_shows_scores_and_curves(page):
    text, rest = page.read_text(encoding="utf-8").split("</table>")
    assert "Brackets are 95 % intervals" in rest
    heads = re.findall("<th>(.*?)</th>", text)
    table = dict(zip(heads, re.findall("(?s)<td>(.*?)</td>", text), strict=False))
    assert table["lr"] == "0.5" and table["analogies %"].startswith("25.0\n[")
    assert table["WordSim-353"] == "0.500"
    figure = figure_of(page)
    titles = [axis["title"]["text"] for axis in figure["layout"].values()]
    assert titles == ["training loss", "words per second"]
    curves = figure["data"]
    assert [(trace["legendgroup"], trace["showlegend"]) for trace in curves] == [
        (0, True),
        (1, True),
        (0, False),
        (1, False),
    ]


def test_a_comparison_has_groups_bands_verdicts_and_the_best(tmp_path):
    ends = {"Adam": [], "SGD": []}
    for name, accuracy in (("SGD", 0.2), ("Adam", 0.4)):
        for seed in (1, 2, 3):
            seconds = seed * (10.0 if name == "Adam" else 30.0)
            lines = [
                {"epoch": n, "words": n * 10, "seconds": n * seconds / 3, "held_out_loss": 4 - n}
                for n in (1, 2, 3)
            ]
            scores = scores_of(accuracy + seed / 100, held_out=seed, seconds=seconds)
            settings = [f"optimizer.name={name}", "optimizer.lr=1", f"train.seed={seed}"]
            run = write_run(
                tmp_path / f"{name}{seed}", scores | {"words": 30}, *settings, metrics=lines
            )
            ends[name].append(runs.figures(runs.read(run)))
    page = report.write([tmp_path])
    text = page.read_text(encoding="utf-8")
    assert "Adam &gt; SGD (p &lt; .001)" in text and text.count("★") == 1
    assert "tested by the mean of all scores" in text
    rows = re.findall(r"<tr>(<td>.*?)</tr>", text)
    assert "Adam" in rows[0] and "★" in rows[0] and "SGD" in rows[1] and "★" not in rows[1]
    assert "42.0 ± 1.0" in rows[0] and "22.0 ± 1.0" in rows[1]
    curves = figure_of(page)
    titles = [axis["title"]["text"] for axis in curves["layout"].values()]
    panel = f"y{titles.index('held-out loss') + 1}"
    traces = [trace for trace in curves["data"] if trace["yaxis"] == panel]
    lines, bands = traces[::2], traces[1::2]
    assert [line["name"] for line in lines] == ["Adam", "SGD"]
    for line, band in zip(lines, bands, strict=True):
        figures = ends[line["name"]]
        assert line["y"][-1] == pytest.approx(mean(each["held-out loss"] for each in figures))
        seconds = mean(each["seconds"] for each in figures)
        assert line["meta"]["seconds"][-1] == pytest.approx(seconds)
        assert line["meta"]["words"] == [10, 20, 30]
        assert band["y"] == [3, 2, 3, 1, 2, 3] and band["meta"]["words"][:3] == [10, 20, 30]


def test_more_rows_than_colors_have_other_lines(tmp_path):
    line = [{"words": n, "seconds": n, "loss": 2.0} for n in (1, 2)]
    for number in range(len(report.COLORS) + 1):
        write_run(tmp_path / str(number), None, f"optimizer.lr={number + 1}", metrics=line)
    traces = figure_of(report.write([tmp_path]))["data"]
    assert len({tuple(trace["line"].values())[:2] for trace in traces}) == len(traces)


def test_what_no_run_has_counted_is_left_out(tmp_path):
    scores = scores_of(0.25)
    run = write_run(tmp_path / "one", scores, metrics=[{"words": 1, "seconds": 1, "loss": 2.0}])
    text = report.write([run]).read_text()
    assert "analogies %" in text and "SimLex-999" not in text and "intervals" not in text


def test_pages_of_a_folder_of_runs_share_one_script(tmp_path):
    line = {"words": 1, "seconds": 1, "loss": 2.0}
    one, two = (write_run(tmp_path / "my runs" / name, metrics=[line]) for name in ("one", "two"))
    page = report.write([one])
    parsed = Page(page.read_text())
    assert page == one / "report.html" and 'id="map"' not in page.read_text()
    assert ("src", "../plotly.min.js") in parsed.attributes
    page = report.write([one, two])
    assert page == tmp_path / "my runs" / "report.html"
    assert ("src", "plotly.min.js") in Page(page.read_text()).attributes
    assert len(list(tmp_path.rglob("plotly.min.js"))) == 1
    report.write([one], tmp_path / "x" / "y.html")
    assert (tmp_path / "x" / "plotly.min.js").exists()


def test_plotly_is_named_where_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(report, "distribution", mock.Mock(side_effect=PackageNotFoundError))
    run = write_run(tmp_path / "one", metrics=[{"words": 1, "seconds": 1, "loss": 2.0}])
    with pytest.raises(report.ReportError, match="needs plotly: pip install"):
        report.write([run])
    assert not (run / "report.html").exists()


@pytest.mark.skipif(not shutil.which("node"), reason="needs node")
def test_script_parses(tmp_path):
    file = tmp_path / "script.js"
    script = report.TEMPLATE.read_text().split("<script>")[1].split("</script>")[0]
    file.write_text(re.sub(r"{{ palette.*}}", "[]", script))
    subprocess.run(["node", "--check", file], check=True)


@pytest.mark.skipif(not BROWSER, reason="needs chromium")
def test_a_narrow_browser_draws_searches_and_sorts(tmp_path, monkeypatch):
    pytest.importorskip("plotly")
    monkeypatch.undo()
    page = make_page(tmp_path / "runs")
    script = """
    const found = {};
    const input = get("input");
    const seek = (word) => {
      input.value = word;
      input.oninput();
      return get("#near").innerText.split("\\n").concat(get("#hints").innerText);
    };
    const names = () => get("#map").data[2].text.length;
    const first = () => get("tbody").rows[0].cells[0].innerText;
    onload = () => setTimeout(() => {
      found.curve = get("#curves").data[0].x;
      get("#axis").value = "seconds";
      get("#axis").onchange();
      found.axis = get("#curves")._fullLayout.xaxis.type;
      found.title = get("#curves")._fullLayout.xaxis.title.text;
      found.legends = [get("#curves")._fullLayout.showlegend];
      get("#figures").textContent = get("#figures").textContent
        .replace('"name": "', '"name": "' + "x".repeat(500));
      get("#axis").onchange();
      found.legends.push(get("#curves")._fullLayout.showlegend);
      found.drag = get("#curves")._fullLayout.dragmode;
      found.dots = get("#map").data[0].x.length;
      found.names = names();
      found.nothing = seek("nothing");
      found.rare = seek("word35");
      found.hints = seek("word3");
      seek("word35");
      found.chosen = get("#map").data[1].text;
      get("#near button").click();
      found.clicked = input.value;
      const sorted = [first()];
      for (let n = 0; n < 2; n++) { get("thead").rows[0].cells[0].click(); sorted.push(first()); }
      found.sorted = sorted;
      found.fits = document.documentElement.scrollWidth <= innerWidth;
      found.color = getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number);
      parent.postMessage(JSON.stringify(found), "*");
    }, 500);
    onerror = (message) => parent.postMessage(JSON.stringify({ error: message }), "*");
    """
    text = page.read_text(encoding="utf-8").replace("</body>", f"<script>{script}</script></body>")
    page.write_text(text, encoding="utf-8")
    # A window has at least 500 pixels, a frame in it any width.
    style = "width: 360px; height: 900px; color-scheme:"
    frames = f"""<iframe src="page.html" style="{style} light"></iframe>
    <iframe src="page.html" style="{style} dark"></iframe><script>
    onmessage = (event) => document.body.append("FOUND" + event.data + "END") </script>"""
    (page.parent / "frame.html").write_text(frames)
    command = [BROWSER, "--headless=new", "--no-sandbox", "--use-angle=swiftshader"]
    command += ["--enable-unsafe-swiftshader", "--dump-dom", "--virtual-time-budget=5000"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1300,1000"]
    command += ["--blink-settings=primaryPointerType=2"]  # a finger
    command += [(page.parent / "frame.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    near = query.combination(kv_of(WORDS, VECTORS), ["word35"], 10)
    said = html.unescape(done.stdout)
    both = [json.loads(part) for part in re.findall(r"FOUND(\{.*?\})END", said)]
    assert sorted(found["color"] for found in both) == [[13, 17, 23], [255, 255, 255]]
    for found in both:
        assert found["curve"] == [1, 2, 3] and found["axis"] == "log"
        assert found["title"] == "seconds" and found["legends"] == [True, False]
        assert found["drag"] is False  # a finger scrolls the page
        assert found["dots"] == 30 and 0 < found["names"] <= 30
        assert found["nothing"] == ["", "no word begins so"]
        assert found["hints"][0] == "" and "word30" in found["hints"][1]
        shown = [line.split("\t") for line in found["rare"][:10]]
        assert [word for word, _ in shown][:5] == [word for word, _ in near][:5]
        cosines = [float(cosine) for _, cosine in shown]
        assert cosines == pytest.approx([cosine for _, cosine in near], abs=0.01)
        assert found["clicked"] == near[0][0] and found["chosen"]
        names = [cell.split()[2] for cell in found["sorted"]]
        assert names == ["0.5", "0.5", "0.25"]  # falling first
        assert found["fits"] is True
