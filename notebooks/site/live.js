// The figures of a page, changed by Python in a worker.  How each begins is stored with the page: Python takes seconds to start.
import { Figure, idle, painted } from "./figures.js";

const here = import.meta.url;
const places = [...document.querySelectorAll(".actmem-shown:not([data-taken])")];
for (const place of places) place.dataset.taken = "true";

const script = (address) => new Promise((loaded, failed) => {
  const node = document.createElement("script");
  node.src = address;
  node.onload = loaded;
  node.onerror = () => failed(new Error(`${address} did not load`));
  document.head.append(node);
});
// One worker for the page; answers come in the order of the questions.
class Python {
  constructor(cells) {
    this.waiting = new Map();
    this.worker = new Worker(new URL("worker.js", here), { type: "module" });
    this.worker.onmessage = ({ data }) => {
      const { done, fail } = this.waiting.get(data.number);
      this.waiting.delete(data.number);
      if (data.error) fail(new Error(data.error));
      else done(JSON.parse(data.answer));
    };
    this.worker.onerror = (event) => {
      for (const { fail } of this.waiting.values()) fail(new Error(event.message ?? "Python did not start"));
    };
    this.worker.postMessage({ cells: JSON.stringify(cells) });
    this.number = 0;
  }
  ask(message) {
    return new Promise((done, fail) => {
      this.waiting.set(++this.number, { done, fail });
      this.worker.postMessage({ number: this.number, message: JSON.stringify(message) });
    });
  }
}

// What the next key shows is asked for before it comes: a step on in the direction of the last one, and a step back.  Where one
// takes long, the next question would wait for answers that nobody may want.
const LONG = 100;
const ahead = (ask) => {
  let last = {}, known = new Map();
  return async (message) => {
    const { control, place } = message, isAgain = control && control === last.control;
    const by = isAgain && place < last.place ? -1 : 1;
    const found = isAgain && known.get(place), asked = ask(message), began = performance.now();
    asked.catch(() => {});
    last = message;
    known = new Map();
    const state = await (found || asked);
    if (!control || last !== message || performance.now() - began > LONG) return state;
    const options = state.controls[control].options.length;
    for (const next of [place + by, place - by]) {
      if (next < 0 || next >= options) continue;
      known.set(next, ask({ control, place: next, ahead: true }));
      known.get(next).catch(() => {});
    }
    return state;
  };
};

if (places.length) {
  const cells = await (await fetch(new URL(`${places[0].dataset.page}.json`, here))).json();
  await painted();
  const code = Object.fromEntries(Object.entries(cells).flatMap(([cell, { code }]) => code ? [[cell, code]] : []));
  const python = new Python(code);
  const plotly = script(new URL("plotly.min.js", here).href).then(() => globalThis.Plotly);
  for (const place of places) {
    const cell = place.dataset.cell;
    place.figure = new Figure(place, cell, cells[cell], ahead((message) => python.ask({ ...message, cell })), plotly);
  }
  // Python makes the figures while nobody asks, one by one, so that the first move of a control doesn't wait for it.
  for (const { dataset: { cell } } of places) {
    if (!code[cell]) continue;
    await idle();
    await python.ask({ cell, ready: true }).catch(() => {});  // who moves a control is told
  }
}
