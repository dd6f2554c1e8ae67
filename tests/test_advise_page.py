"""The HTML page: whole, self-contained, and with the report's numbers; the charts' axes."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from wavefill.advise import advise
from wavefill.advise.charts import Series, axis, legend, lines, shares, short
from wavefill.advise.page import to_html
from wavefill.cli import app

VOID = {"meta", "br", "circle", "line", "rect", "polyline"}


class Balanced(HTMLParser):
    """Tags that are open; fails on one that closes another. Words between them are kept."""

    def __init__(self, page):
        super().__init__()
        self.open, self.words, self.tags = [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert tag in VOID or self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


REPORTS = [
    ("llama-3.1-8b", "h200", {"batch": 4}), ("deepseek-r1", "gb300", {"gpus": 8, "kv": "fp8", "plans": True}),
    ("nemotron-h-8b", "a100", {"phase": "decode", "context": 1000}), ("gpt-oss-20b", "mi300x", {"phase": "prefill"}),
    ("gemma-3-27b", "rtx4090", {"gpus": 1, "plans": True}), ("llama-3.1-405b", "l40s", {"context": 1, "plans": True}),
]


@pytest.mark.parametrize(("model", "gpu", "options"), REPORTS, ids=[" ".join(each[:2]) for each in REPORTS])
def test_a_page_is_whole_and_fetches_nothing(model, gpu, options):
    report = advise(model, gpu, **options)
    page = to_html(report)
    parsed = Balanced(page)
    assert not parsed.open
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in parsed.tags}
    assert not any({"src", "href"} & {*attributes} for _, attributes in parsed.tags)
    assert "nan" not in page
    assert "viewport" in page
    words = " ".join(parsed.words)
    for part in ("What to change", "Roofline", "Time by component", "Sweeps", "Where the numbers come from"):
        assert part in words
    assert ("Parallel plans for decoding" in words or "No plan has room" in words) == ("plans" in options)
    for finding in report.findings:
        assert finding.rule in words
    for parts in report.phases.values():
        assert all(each.name in words for each in parts)
    assert all("aria-label" in attributes for tag, attributes in parsed.tags if tag == "svg")


def test_everything_drawn_is_inside_its_chart():
    page = to_html(advise("deepseek-r1", "gb300", gpus=8, kv="fp8", weights="fp8", plans=True, target=30))
    for name, most in (("cx", 400), ("cy", 270), ("x1", 400), ("y2", 270)):
        found = [float(value) for value in re.findall(rf' {name}="([-.\d]+)"', page)]
        assert found
        assert all(0 <= value <= most for value in found)
    for points in re.findall(r'points="([^"]+)"', page):
        assert all(0 <= float(x) <= 400 and 0 <= float(y) <= 270
                   for x, y in (point.split(",") for point in points.split()))


def test_names_are_escaped():
    config = {"_name_or_path": "<b>x</b>", "model_type": "llama", "vocab_size": 100, "hidden_size": 64,
              "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    page = to_html(advise(config, "h200", context=100))
    assert "<b>x" not in page
    assert "&lt;b&gt;x" in page


def test_axes_hold_all_values():
    log = axis("x", [3, 4000], True)
    assert (log.low, log.high, log.ticks) == (1, 10000, (1, 10, 100, 1000, 10000))
    assert log.at(100) == pytest.approx(0.5)
    linear = axis("y", [0.5, 163], False)
    assert (linear.low, linear.high, linear.ticks) == (0, 200, (0, 50, 100, 150, 200))
    assert axis("y", [7], False).high >= 7
    assert axis("x", [5, 5], True).at(5) <= 1


def test_numbers_are_short():
    assert [short(value) for value in (4096, 1 << 20, 5, 0.25, 1234.5, 20000, 3e-5, 0)] == [
        "4K", "1M", "5", "0.25", "1,234", "2e4", "3e-5", "0"]


def test_charts():
    x, y = axis("x", [1, 10], True), axis("y", [0, 10], False)
    found = lines("a & b", x, y, [Series("one", [(1, 0), (10, 10, "the end"), (2, 5, "<2>")], dashed=True)])
    assert 'aria-label="a &amp; b"' in found
    assert "<title>one: 1, 0</title>" in found
    assert "<title>the end</title>" in found
    assert "<title>&lt;2&gt;</title>" in found
    assert "stroke-dasharray" in found
    bars = shares("parts", "context", [("1K", "3 ms", [1, 3, 0])], ["a", "b", "c"])
    assert bars.count("<rect") == 2
    assert "1K: b 75.0%" in bars
    assert legend(["a", "b"]).count("class=\"key\"") == 2


def test_the_command_writes_the_page(tmp_path):
    file = tmp_path / "new" / "report.html"
    done = CliRunner().invoke(app, ["advise", "llama-3.1-70b", "--gpus", "8", "--html", str(file)])
    assert done.exit_code == 0, done.output
    assert "Pareto front" in file.read_text(encoding="utf-8")
    assert "decode:" in done.stdout
    done = CliRunner().invoke(app, ["advise", "llama-3.1-8b", "--html", str(tmp_path)])
    assert done.exit_code != 0
    assert "--html: must be a file that can be written" in done.output + done.stderr
