// A figure in a notebook.  Questions go to the kernel one at a time: a model sends only the last of several changes.
async function render({ model, el }) {
  const place = document.createElement("div");
  place.className = "actmem-shown";
  // Keys belong to the figure: JupyterLab looks at them before it (shortcuts) and after it (Enter).
  place.dataset.lmSuppressShortcuts = "true";
  place.onkeydown = (event) => event.stopPropagation();
  el.append(place);
  const carrier = await carried(model);
  let number = carrier.get("number"), answered = () => {}, before = Promise.resolve();
  const listen = () => { if (carrier.get("number") === number) answered(carrier.get("state")); };
  carrier.on(listen);
  const ask = (message) => before = before.then(() => new Promise((done) => {
    answered = done;
    number += 1;
    model.set("asked", { ...message, number });
    model.save_changes();
  }));
  const meet = meeting();
  const figure = new Figure(place, `figure${meet.figures += 1}`, { state: carrier.get("state"), answer: carrier.get("answer") }, ask, meet.plotly);
  return () => { carrier.off(listen); figure.close(); };
}
export default { render };
