// Loads plotly.js on its own time, and once: a page that has it from another kernel does not load it again; a page that was
// reloaded asks for it.
function initialize({ model }) {
  const place = meeting();
  if (place.loading) return;
  const load = () => {
    if (place.loading || !model.get("source")) return;
    place.loading = true;
    const url = URL.createObjectURL(new Blob([model.get("source")], { type: "text/javascript" }));
    import(url)
      .then((loaded) => place.arrived(loaded.default), (error) => { place.loading = false; console.error(error); })
      .finally(() => URL.revokeObjectURL(url));
  };
  model.on("change:source", load);
  load();
  if (!place.loading) model.send({});
}
export default { initialize };
