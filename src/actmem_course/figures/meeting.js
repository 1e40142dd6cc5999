// Both scripts meet at one promise on the page, whichever comes first.
function meeting() {
  const place = (globalThis.__actmemPlotly ??= { figures: 0 });
  place.plotly ??= new Promise((arrived) => { place.arrived = arrived; });
  return place;
}
