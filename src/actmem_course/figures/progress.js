// A line that says how long a process has been running.
async function render({ model, el }) {
  const state = await carried(model);
  const node = document.createElement("div");
  node.setAttribute("role", "status");
  Object.assign(node.style, { minHeight: "1.4em", padding: "2px 4px", fontWeight: "600" });
  const write = () => { node.textContent = state.get("text"); };
  el.append(node);
  write();
  state.on(write);
  return () => state.off(write);
}
export default { render };
