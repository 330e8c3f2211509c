"""The page of halfstep export -to web says what a model answers, or why it has no answer."""

import json
import shutil
import subprocess

import pytest

from engine.export.web import PAGE

# A document that keeps only texts, and the texts that the page shows for a result
DOCUMENT = """
class Item {
  constructor(kind) { this.kind = kind; this.items = []; this.classList = { toggle() {} }; }
  append(...items) { this.items.push(...items); }
  addEventListener() {}
  setAttribute() {}
}
const kept = new Item("body");
const document = { createElement: (kind) => new Item(kind), getElementById: () => kept, addEventListener() {} };
const fetch = async () => { throw new Error("no network"); };
"""
SHOW = """
const [facts, result] = JSON.parse(process.argv[1]), place = new Item("div");
model = facts;
show(place, result);
const textsOf = (item) => [...(item.textContent ? [item.textContent] : []), ...item.items.flatMap(textsOf)];
console.log(JSON.stringify(textsOf(place)));
"""


def shown(probabilities: dict[str, float], is_stranger: bool = False, **facts) -> list[str]:
    """Return the texts that the page shows for a photo with these probabilities, the largest first."""
    guesses = [{"name": name, "probability": value} for name, value in probabilities.items()]
    result = {"guesses": guesses, "isStranger": is_stranger}
    program = DOCUMENT + (PAGE / "page.js").read_text(encoding="utf-8") + SHOW
    words = ["node", "-e", program, json.dumps([{"several": False, "threshold": 0.9} | facts, result])]
    return json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node here (apt-get install nodejs)")
def test_page_says_why_a_photo_is_unknown():
    birds = {"birds": 0.828, "cars": 0.172}
    assert shown(birds, threshold=0.8) == ["birds", "birds", "82.8%", "cars", "17.2%"]
    few, strange = shown(birds), shown(birds, threshold=0.8, is_stranger=True)
    assert few[0] == "unknown: no class has a probability of 90.0% or more"
    assert strange[0] == "unknown: unlike the photos of the training"
    for texts in (few, strange):
        assert texts[1].startswith("Of the known classes") and texts[2:] == ["birds", "82.8%", "cars", "17.2%"]
    assert shown({"birds": 0.6, "cars": 0.55}, several=True)[0] == "birds, cars"
    assert shown({"birds": 0.4}, several=True) == ["no label", "birds", "40.0%"]
