"""The report is one safe file with all runs; a card tells what a run is."""

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest

from tests.support.planted import kv_of
from tests.support.runs import scores_of, write_run
from w2v.text.vocab import Vocab
from w2v.vectors import export, plots, report

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


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A report of a scored run with vectors, and of one that still trains."""
    folder = tmp_path_factory.mktemp("runs")
    lines = [
        {"words": n, "seconds": n, "loss": 3 / n, "words_per_s": 9, "lr": 0.1} for n in (1, 2, 3)
    ]
    phases = [{"phase": "reading", "seconds": 1.0}, {"phase": "training", "seconds": 3.0}]
    scores = scores_of(0.25) | {"words": 3, "seconds": 3}
    done = write_run(folder / "a<b>", scores, "train.epochs=3", metrics=[*lines, *phases])
    write_run(folder / "running", metrics=lines)
    words = [f"word{number}" for number in range(40)]
    words[3] = ATTACK
    vectors = np.random.default_rng(1).standard_normal((40, 8)).astype(np.float32)
    export.save(kv_of(words, vectors), done, ["kv"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "MAP_WORDS", 30)
        return report.write([folder], folder / "page.html")


def test_a_run_of_few_words_has_no_map(tmp_path):
    run = write_run(tmp_path / "run", metrics=[{"words": 1, "seconds": 1, "loss": 3}])
    export.save(kv_of(["a", "b"], np.ones((2, 8), np.float32)), run, ["kv"])
    assert report.write([run], tmp_path / "page.html").exists()


def test_page_is_whole_and_loads_nothing(page):
    text = page.read_text(encoding="utf-8")
    parsed = Page(text)
    assert not {"link", "iframe", "a", "base"} & set(parsed.tags)
    assert not {"href", "srcset", "onclick"} & {name for name, _ in parsed.attributes}
    images = [value for name, value in parsed.attributes if name == "src"]
    assert images and all(value.startswith("data:image/svg+xml;base64,") for value in images)
    assert not re.search(r"https?:|//\w|@import|url\(|fetch\(|import\(|innerHTML", text)


def test_words_and_names_are_escaped(page):
    text = page.read_text(encoding="utf-8")
    parsed = Page(text)
    assert ATTACK not in text and "a<b>" not in text
    assert parsed.tags.count("script") == 2
    (data,) = json.loads(parsed.text["script"][0])
    assert data["name"] == "a<b>" and ATTACK in data["words"]
    assert any(ATTACK in cell for cell in parsed.text["td"]), "as a neighbor"


def test_map_has_places_groups_and_nearest_words(page):
    (data,) = json.loads(Page(page.read_text(encoding="utf-8")).text["script"][0])
    places = np.array(data["places"])
    assert places.shape == (30, 2) and places.min() == 0 and places.max() == 1
    assert len(data["groups"]) == 30 and max(data["groups"]) < len(plots.COLORS)
    vectors = np.random.default_rng(1).standard_normal((40, 8))[:30]
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    assert data["near"][5][0] == np.argsort(-vectors @ vectors[5])[1]


def test_page_shows_scores_curves_and_phases(page):
    parsed = Page(page.read_text(encoding="utf-8"))
    cells = parsed.text["td"]
    values = {name: cells[place + 1 : place + 3] for place, name in enumerate(cells)}
    assert values["analogies %"] == ["25.0", "-"] and values["WordSim-353"] == ["0.500", "-"]
    assert values["epochs"] == ["3", "5"]
    # Loss and speed of both runs; analogies, and held-out loss by words and seconds, of one.
    titles = [value for name, value in parsed.attributes if name == "alt"]
    assert len(titles) == 5 and len(set(titles)) == 5
    widths = [value for name, value in parsed.attributes if name == "style"]
    assert widths == ["width: 25.00%", "width: 75.00%"]


def test_what_no_run_has_counted_is_left_out(tmp_path):
    scores = scores_of(0.25)
    scores["analogies"]["semantic"] = {"accuracy": 0.0, "counted": 0, "skipped": 9}
    parts = [("gram1", 4), ("capital", 0)]
    scores["analogies"]["sections"] = [
        {"name": name, "accuracy": 0.0, "counted": counted} for name, counted in parts
    ]
    run = write_run(tmp_path / "one", scores, metrics=[{"words": 1, "seconds": 1, "loss": 2.0}])
    cells = Page(report.write([run]).read_text()).text["td"]
    assert {"analogies %", "gram1"} < set(cells)
    assert not {"semantic %", "capital", "SimLex-999"} & set(cells)


def test_runs_without_scores_or_vectors_get_a_page(tmp_path):
    line = {"words": 1, "seconds": 1, "loss": 2.0}
    one, two = (write_run(tmp_path / name, metrics=[line]) for name in ("one", "two"))
    page = report.write([one])
    assert page == one / "report.html" and ("hidden", None) in Page(page.read_text()).attributes
    assert report.write([one, two]) == tmp_path / "pictures" / "report.html"


def test_pictures_are_as_wide_as_their_place():
    template = report.TEMPLATE.read_text()
    assert re.search(r"^\.panels img { width: 100% }$", template, re.M)  # without a browser too


@pytest.mark.skipif(not shutil.which("node"), reason="needs node")
def test_script_parses(tmp_path):
    file = tmp_path / "script.js"
    script = report.TEMPLATE.read_text().split("<script>")[1].split("</script>")[0]
    file.write_text(script)
    subprocess.run(["node", "--check", file], check=True)


@pytest.mark.skipif(not BROWSER, reason="needs chromium")
@pytest.mark.parametrize(("scheme", "background"), [(1, [255, 255, 255]), (0, [13, 17, 23])])
def test_a_narrow_browser_searches_clicks_and_zooms(page, tmp_path, scheme, background):
    script = """
    const view = get("view"), box = view.getBoundingClientRect(), found = [];
    const send = (type, more) => view.dispatchEvent(new PointerEvent(type, more));
    const where = () => JSON.stringify(spans().map((span) => span.getBoundingClientRect().left));
    const spans = () => [...view.querySelectorAll("span")];
    const seek = (word) => {
      get("find").value = word;
      get("find").dispatchEvent(new Event("input"));
      found.push(get("near").textContent);
    };
    seek("WORD7"); seek("nothing"); seek("word7");
    const center = spans()[7].getBoundingClientRect();
    const isSeen = center.left >= box.left && center.left < box.right &&
                   center.top >= box.top && center.top < box.bottom;
    const views = [where()];
    view.dispatchEvent(new WheelEvent("wheel", { deltaY: -300, clientX: box.left + 99,
      clientY: box.top + 99 }));
    views.push(where());
    send("pointerdown"); send("pointermove", { buttons: 1, movementX: -60 });
    spans()[9].click();  // a drag chooses nothing
    found.push(get("near").textContent);
    views.push(where());
    found.push(new Set(views).size);
    get("all").click();
    send("pointerdown");
    spans()[3].firstChild.click();
    found.push(get("near").textContent);
    found.push(isSeen && spans().some((span) => span.className));
    found.push(document.documentElement.scrollWidth <= innerWidth);
    found.push(getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number));
    parent.postMessage(JSON.stringify(found), "*");
    """
    text = page.read_text(encoding="utf-8").replace("</body>", f"<script>{script}</script></body>")
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    # A window has at least 500 pixels, a frame in it any width.
    frame = """<iframe src="page.html" style="width: 360px; height: 900px"></iframe><script>
    onmessage = (event) => document.body.append("FOUND" + event.data + "END") </script>"""
    (tmp_path / "frame.html").write_text(frame)
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--blink-settings=preferredColorScheme={scheme}"]  # 0 is dark
    command += ["--virtual-time-budget=5000", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--window-size=1300,1000", (tmp_path / "frame.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    seven, nothing, again, dragged, views, clicked, marked, fits, color = json.loads(
        re.findall(r"FOUND(\[.*?\])END", html.unescape(done.stdout))[-1]
    )
    assert seven == again == dragged and seven.startswith("Nearest to word7: word")
    assert nothing.startswith("Not among") and clicked.startswith(f"Nearest to {ATTACK}: word")
    assert views == 3 and marked and fits is True and color == background


@pytest.fixture
def finished(tmp_path):
    return write_run(tmp_path / "one", scores_of(0.25), "corpus.path=wiki.txt", "train.epochs=3")


def test_card_tells_what_the_run_is(finished):
    (finished / "env.txt").write_text("machine 8 cores | 1 GPU\ntorch 2.10\n")
    report.write_card(finished, Vocab(["the", "of"], np.array([5, 2]), 9, 4))
    text = (finished / "README.md").read_text()
    for part in (
        "# Word vectors of wiki.txt",
        "most_similar('the')",
        "9 words, 4 distinct",
        "| epochs | 3 |",
        "5,000,000 words in 10.0 s",
        "| M words/s | 0.5 |",
        "| 8 cores, 1 GPU |",
        "w2v unknown, commit unknown, Python unknown, torch 2.10",
        "| analogies % | 25.0 |\n| questions | 8 |",
        "| WordSim-353 | 0.500 |",
        "  epochs: 3\n",
    ):
        assert part in text, part


def test_card_of_baskets_has_no_empty_tables(tmp_path):
    scores = scores_of(0.0)
    for part in ("total", "semantic", "syntactic"):
        scores["analogies"][part] = {"accuracy": 0.0, "counted": 0, "skipped": 9}
    for pairs in scores["similarity"].values():
        pairs["spearman"] = None
    folder = write_run(tmp_path / "one", scores)
    report.write_card(folder, Vocab(["milk"], np.array([5]), 9, 4))
    text = (folder / "README.md").read_text()
    assert not any(name in text for name in ("analogies %", "semantic %", "SimLex", "WordSim"))
