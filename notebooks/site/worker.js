// The Python of a page: starts Pyodide, then answers one message after the other.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const started = (async () => {
  const archive = fetch(new URL("actmem.zip", import.meta.url)).then((response) => response.arrayBuffer());
  const python = await loadPyodide({ indexURL: new URL("./pyodide/", import.meta.url).href });
  python.unpackArchive(await archive, "zip", { extractDir: "/course" });
  python.runPython("import sys; sys.path.insert(0, '/course')");
  return python.pyimport("actmem_course.figures.in_page");
})();
let page;

self.onmessage = async ({ data }) => {
  try {
    const module = await started;
    if (data.cells) page = module.Page(data.cells);
    else self.postMessage({ number: data.number, answer: page.ask(data.message) });
  } catch (error) {
    self.postMessage({ number: data.number, error: String(error.message ?? error).trim().split("\n").pop() });
  }
};
