// Classifies photos with the graph in model.onnx. model.json has its class names and what it needs to know of a photo.
"use strict";

const MOST_BARS = 5, AT_ONCE = 2 ** 22, STRANGE = "unlike the photos of the training";
const byId = (id) => document.getElementById(id);
let ort, model, session;
let queue = Promise.resolve(); // one photo after the other

// Returns the content of a file, or throws an error if it is missing or has another checksum.
async function get(url, integrity = "") {
  const response = await fetch(url, { integrity });
  if (!response.ok) throw new Error(`${url}: ${response.status} ${response.statusText}`);
  return response;
}

async function load() {
  model = await (await get("model.json")).json();
  const [script, wasm] = await Promise.all(model.runtime.map(({ url, integrity }) => get(url, integrity)));
  const code = new Blob([await script.text()], { type: "text/javascript" });
  ort = await import(URL.createObjectURL(code));
  ort.env.wasm.numThreads = 1; // more need headers that a plain server does not send
  ort.env.wasm.wasmBinary = await wasm.arrayBuffer();
  session = await ort.InferenceSession.create("model.onnx", { executionProviders: ["wasm"] });
  byId("status").textContent = `Ready: ${model.classes.length} ${model.numbers ? "numbers" : "classes"}.`;
  byId("choose").disabled = byId("take").disabled = false;
}

// Returns uint8 pixels [height, width, 4] with their opacity, or throws an error with a sentence.
async function pixelsOf(file) {
  let image;
  try {
    image = await createImageBitmap(file, {
      imageOrientation: model.turns ? "from-image" : "none",
      colorSpaceConversion: "none",
    });
  } catch {
    throw new Error("This browser cannot read the file as an image.");
  }
  const { width, height } = image;
  if (width * height > model.max_pixels) throw new Error(`The photo has too many pixels (${width} x ${height}).`);
  const rows = Math.max(1, Math.floor(AT_ONCE / width)); // phones draw at most 16 megapixels on a canvas
  const context = new OffscreenCanvas(width, Math.min(rows, height)).getContext("2d", { willReadFrequently: true });
  const pixels = new Uint8Array(width * height * 4);
  for (let top = 0; top < height; top += rows) {
    context.clearRect(0, 0, width, rows);
    context.drawImage(image, 0, -top);
    pixels.set(context.getImageData(0, 0, width, Math.min(rows, height - top)).data, top * width * 4);
  }
  image.close();
  return { pixels, width, height };
}

async function classify(file) {
  const { pixels, width, height } = await pixelsOf(file);
  const photo = new ort.Tensor("uint8", pixels, [height, width, 4]);
  const { probabilities, numbers, known } = await session.run({ photo });
  if (model.numbers) return { values: Array.from(numbers.data), isStranger: known !== undefined && known.data[0] < 0 };
  const guesses = Array.from(probabilities.data, (probability, number) => ({ name: model.classes[number], probability }))
    .sort((one, other) => other.probability - one.probability);
  return { guesses, isStranger: known !== undefined && known.data[0] < 0 };
}

// The answer in words: the most probable class, or all labels above one half.
function answerOf(guesses) {
  if (!model.several) return guesses[0].name;
  return guesses.filter((each) => each.probability > 0.5).map((each) => each.name).join(", ");
}

// Why the photo has no answer, or "".
function whyUnknown({ guesses, isStranger }) {
  if (model.several) return "";
  if (isStranger) return STRANGE;
  const limit = (Math.ceil(1000 * model.threshold) / 10).toFixed(1);
  return guesses[0].probability >= model.threshold ? "" : `no class has a probability of ${limit}% or more`;
}

function element(kind, text = "", className = "") {
  const made = document.createElement(kind);
  made.textContent = text;
  made.className = className;
  return made;
}

// Shows each number with the interval that most true numbers lie in.
function showNumbers(place, { values, isStranger }) {
  if (isStranger) place.append(element("h2", STRANGE, "unknown"));
  values.forEach((value, number) => {
    const half = model.interval?.[number];
    const digits = (each) => half ? each.toFixed(Math.max(2 - Math.floor(Math.log10(half)), 0)) : String(Number(each.toPrecision(5)));
    const line = element("div", "", "bar");
    const [least, most] = model.limits?.[number] ?? [null, null];
    const end = (each) => digits(Math.min(Math.max(each, least ?? -Infinity), most ?? Infinity));
    const ends = half == null ? "" : ` (${end(value - half)} to ${end(value + half)})`;
    line.append(element("span", model.classes[number]), element("span", digits(value) + ends));
    place.append(line);
  });
}

function show(place, result) {
  if (model.numbers) return showNumbers(place, result);
  const { guesses } = result, reason = whyUnknown(result), answer = reason ? "" : answerOf(guesses);
  const unanswered = reason ? `unknown: ${reason}` : "no label";
  place.append(element("h2", answer || unanswered, answer ? "" : "unknown"));
  if (reason) place.append(element("p", "Of the known classes, the most probable are:", "note"));
  for (const { name, probability } of guesses.slice(0, MOST_BARS)) {
    const bar = element("div", "", "bar"), meter = element("meter");
    meter.value = probability;
    meter.setAttribute("aria-label", name);
    bar.append(element("span", name), element("span", `${(100 * probability).toFixed(1)}%`), meter);
    place.append(bar);
  }
}

function add(file) {
  const item = element("li"), picture = element("img"), answer = element("div", "", "answer");
  picture.src = URL.createObjectURL(file);
  picture.alt = file.name;
  const waiting = element("p", "Looking …");
  answer.append(element("small", file.name), waiting);
  item.append(picture, answer);
  byId("photos").prepend(item);
  queue = queue.then(() => classify(file)).then(
    (result) => { waiting.remove(); show(answer, result); },
    (error) => { waiting.textContent = error.message; },
  );
}

for (const id of ["choose", "take"]) {
  byId(id).addEventListener("change", (event) => {
    [...event.target.files].forEach(add);
    event.target.value = ""; // so that the same photo can be chosen again
  });
}
const drop = byId("drop");
for (const name of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault();
    drop.classList.toggle("over", name === "dragover");
    if (name === "drop" && session) [...event.dataTransfer.files].forEach(add);
  });
}
load().catch((error) => { byId("status").textContent = `The model cannot be loaded: ${error.message}`; });
