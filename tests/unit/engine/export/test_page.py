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
  prepend(item) { this.items.unshift(item); }
  remove() { this.textContent = ""; }
  addEventListener() {}
  setAttribute() {}
}
const kept = new Item("body"), handlers = {};
const addEventListener = (name, handler) => { handlers[name] = handler; };
const document = { createElement: (kind) => new Item(kind), getElementById: () => kept, addEventListener };
const fetch = async () => { throw new Error("no network"); };
const textsOf = (item) => [...(item.textContent ? [item.textContent] : []), ...item.items.flatMap(textsOf)];
"""
SHOW = """
const [facts, result] = JSON.parse(process.argv[1]), place = new Item("div");
model = facts;
show(place, result);
console.log(JSON.stringify(textsOf(place)));
"""
# Adds photos with these names. One that is called notes.txt is no image.
ADD = """
model = { several: false, threshold: 0 };
URL.createObjectURL = () => "";
classify = async ({ name }) => {
  if (name === "notes.txt") throw new Error("no image");
  return { guesses: [{ name: `class of ${name}`, probability: 1 }], isStranger: false };
};
JSON.parse(process.argv[1]).forEach((name) => add({ name }));
queue.then(() => console.log(JSON.stringify(kept.items.map(textsOf))));
"""
# Drops a photo before and after the graph has been loaded.
DROP = """
let prevented = 0;
const files = [{ name: "1.jpg" }];
const dropPhoto = () => handlers.drop({ preventDefault() { prevented++; }, dataTransfer: { files } });
URL.createObjectURL = () => "";
classify = async () => ({ guesses: [{ name: "cat", probability: 1 }], isStranger: false });
model = { several: false, threshold: 0 };
dropPhoto();
const before = kept.items.length;
session = {};
dropPhoto();
queue.then(() => console.log(JSON.stringify([before, prevented, kept.items.map(textsOf)])));
"""
# Classifies a photo whose classes have the probabilities of the argument, in any order, and shows the result.
CLASSIFY = """
const probabilities = JSON.parse(process.argv[1]), place = new Item("div");
ort = { Tensor: class {} };
pixelsOf = async () => ({ pixels: [], width: 1, height: 1 });
session = { run: async () => ({ probabilities: { data: Object.values(probabilities) } }) };
model = { several: true, threshold: 0.5, classes: Object.keys(probabilities) };
classify({}).then((result) => { show(place, result); console.log(JSON.stringify(textsOf(place))); });
"""
# Reads an image whose rows have the opacities of the argument, on a canvas that keeps what transparent pixels cover.
READ = """
const opacities = JSON.parse(process.argv[1]), width = 2 ** 21;
const createImageBitmap = async () => ({ width, height: opacities.length, close() {} });
class OffscreenCanvas {
  constructor(width, height) { this.pixels = new Uint8Array(width * height * 4); }
  getContext() { return this; }
  clearRect() { this.pixels.fill(0); }
  drawImage(image, left, top) {
    for (let row = 0; row * width * 4 < this.pixels.length; row++)
      if (opacities[row - top]) this.pixels.fill(opacities[row - top], row * width * 4, (row + 1) * width * 4);
  }
  getImageData(left, top, columns, rows) { return { data: this.pixels.subarray(0, columns * rows * 4) }; }
}
model = { max_pixels: 2 ** 30 };
pixelsOf({}).then(({ pixels }) => console.log(JSON.stringify(opacities.map((_, row) => pixels[row * width * 4 + 3]))));
"""
pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="there is no node here (apt-get install nodejs)")


def printed(program: str, argument: object) -> list:
    """Return what the page's program and this one print as JSON."""
    code = DOCUMENT + (PAGE / "page.js").read_text(encoding="utf-8") + program
    words = ["node", "-e", code, json.dumps(argument)]
    return json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def shown(probabilities: dict[str, float], is_stranger: bool = False, **facts) -> list[str]:
    """Return the texts that the page shows for a photo with these probabilities, the largest first."""
    guesses = [{"name": name, "probability": value} for name, value in probabilities.items()]
    return printed(
        SHOW, [{"several": False, "threshold": 0.9} | facts, {"guesses": guesses, "isStranger": is_stranger}]
    )


@pytest.mark.slow
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


def test_all_probable_labels_are_named_and_the_first_have_bars():
    probabilities = {name: 0.55 + number / 20 for number, name in enumerate("abcdefg")} | {"h": 0.1}
    texts = printed(CLASSIFY, probabilities)
    assert texts[0] == "g, f, e, d, c, b, a" and texts[1::2] == ["g", "f", "e", "d", "c"]


def test_intervals_of_numbers_end_at_the_limits_of_the_numbers():
    facts = {"numbers": True, "classes": ["count", "share", "age"], "interval": [3.5, 0.4, None]}
    facts |= {"limits": [[0, None], [-1, 0], [None, None]]}
    texts = printed(SHOW, [facts, {"values": [1.2, -0.25, 30.123456], "isStranger": False}])
    assert texts == ["count", "1.20 (0.00 to 4.70)", "share", "-0.250 (-0.650 to 0.000)", "age", "30.123"]


def test_photos_after_a_file_that_is_no_image_are_classified():
    photos = printed(ADD, ["1.jpg", "notes.txt", "2.jpg"])[::-1]
    assert [texts[0] for texts in photos] == ["1.jpg", "notes.txt", "2.jpg"]
    assert "class of 1.jpg" in photos[0] and "no image" in photos[1] and "class of 2.jpg" in photos[2]


def test_photo_dropped_before_the_graph_is_loaded_is_ignored():
    before, prevented, photos = printed(DROP, None)
    assert prevented == 2, "otherwise the browser leaves the page and opens the photo"
    assert before == 0 and [texts[0] for texts in photos] == ["1.jpg"] and "cat" in photos[0]


def test_strips_of_a_large_photo_do_not_show_through_its_transparent_parts():
    opacities = [255, 200, 0, 0, 90]  # a strip has two rows
    assert printed(READ, opacities) == opacities
