// What a kernel changes of a widget while it is on screen: const state = await carried(model), then as with a model.
async function carried(model) {
  const carrier = await model.widget_manager.get_model(model.get("carrier").slice("IPY_MODEL_".length));
  return {
    get: (name) => JSON.parse(carrier.get("value"))[name],
    on: (change) => carrier.on("change:value", change),
    off: (change) => carrier.off("change:value", change),
  };
}
