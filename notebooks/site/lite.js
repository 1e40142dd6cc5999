// Links from one notebook to another and to the labs: JupyterLite would look for them in its file browser.
document.addEventListener("click", (event) => {
  const link = event.target.closest?.(".jp-RenderedMarkdown a[href]");
  const [, folder, name] = link?.href.match(/\/lite\/files\/(notebooks|labs)\/(\w+)\.\w+(?:\?.*)?$/) ?? [];
  if (!name) return;
  event.preventDefault();
  event.stopImmediatePropagation();
  window.open(new URL(folder === "labs" ? `../../labs/${name}.html` : `index.html?path=notebooks/${name}.ipynb`, location.href));
}, true);
