// The figures of the course, in a notebook and on a page: drawn by Plotly.js, changed by the course's own Python.
// Nothing here knows a number: what a control offers and what a figure shows comes from Python.  How a figure begins, and
// the answer to its question, are there from the start, because Python may be busy for seconds.
const still = matchMedia("(prefers-reduced-motion: reduce)");

const make = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name in node && typeof value !== "string") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
};

const wrap = (text, letters) => text.split("<br>").map((line) => line.split(" ").reduce((lines, word) => {
  const last = lines.at(-1);
  if (last !== undefined && `${last} ${word}`.length <= letters) lines[lines.length - 1] = `${last} ${word}`;
  else lines.push(word);
  return lines;
}, []).join("<br>")).join("<br>");
// Plotly neither wraps nor shrinks words: on a narrow page those at an axis leave no room, and those of a diagram run out of it.
const LETTER = 7.5, LINE = 18, NARROW = 520, SIDES = 80, BESIDE_BOX = 23, SAID = 34, SMALL = 0.75;
const SHORT_STEP = 34;  // passes, each of which gets 7 pixels on the narrowest page
const TALL = 600;  // pixels of a figure that a window would not show whole
const smaller = (size) => Math.max(10, SMALL * size);
const letter = (place) => "abcdefghijklmnopqrstuvwxyz"[place];
const worded = (data, isDiagram) => data.map((given) => {
  const { customdata } = given;
  const trace = customdata ? { ...given, customdata: customdata.map((said) => typeof said === "string" ? wrap(said, SAID) : said) } : given;
  if (isDiagram) {
    if (!trace.textfont) return trace;
    const text = trace.meta === "names" ? trace.text.map((words) => wrap(words, BESIDE_BOX).replaceAll("<br>", "\u00a0<br>")) : trace.text;
    return { ...trace, text, textfont: { ...trace.textfont, size: smaller(trace.textfont.size) } };
  }
  // A short pass has room for one digit, if nothing is left free around it.
  if (trace.text && trace.base && trace.text.every((words) => words.length < 2) && Math.max(...data.flatMap(({ base }) => base ?? [])) < SHORT_STEP) {
    return { ...trace, constraintext: "none", insidetextfont: { ...trace.insidetextfont, size: 9 } };
  }
  // Words at the points of a chart stand below it.
  return trace.meta === "names" ? { ...trace, text: trace.text.map((_, place) => `<b>${letter(place)}</b>`), textposition: "bottom right" } : trace;
});
const fitted = (layout, width) => {
  const fit = { ...layout };
  const names = layout.yaxis?.categoryarray ?? [];
  let left = layout.margin.l;
  if (names.length && layout.yaxis?.showticklabels !== false && !layout.yaxis?.ticktext) {
    const room = (layout.height - SIDES) / names.length;  // of one bar: two lines of words or one
    const words = names.map((name) => room < 2 * LINE ? name : wrap(name, 16));
    left = LETTER * Math.max(...words.flatMap((text) => text.split("<br>")).map((line) => line.length));
    fit.yaxis = { ...layout.yaxis, tickmode: "array", tickvals: names, ticktext: words };
  }
  let lines = 1;
  for (const [name, axis] of Object.entries(layout)) {
    if (!/^xaxis\d*$/.test(name) || !axis.title?.text) continue;
    // A title stands below the middle of its axis, and may be wider.
    const [from, to] = axis.domain ?? [0, 1], plot = width - left - layout.margin.r;
    const middle = left + plot / 2, room = to - from < 1 ? plot * (to - from) : 2 * Math.min(middle, width - middle);
    const text = wrap(axis.title.text, Math.max(12, Math.floor(room / LETTER)));
    fit[name] = { nticks: plot < 120 ? 2 : 4, ...axis, title: { ...axis.title, text } };
    lines = Math.max(lines, text.split("<br>").length);
  }
  if (layout.xaxis?.visible === false) {  // a diagram, whose words are smaller, and those before a row of boxes wrapped
    const { l, r } = layout.margin;
    return { ...fit, margin: { ...layout.margin, l: Math.min(SMALL * l, 0.73 * LETTER * BESIDE_BOX), r: SMALL * r } };
  }
  const more = LINE * (lines - 1);
  return { ...fit, height: layout.height + more, margin: { ...layout.margin, l: left, b: layout.margin.b + more } };
};

// Plotly takes a millisecond for a trace, whatever is in it.  So neighbours of a few bars each that differ in colours and words
// only become one trace, in which each bar has its own; the empty ones, which are there for the legend, are left out.  With
// many bars that takes longer, because Plotly then makes a pattern for each of them.
const FEW = 6;
const isBare = ({ type, x, y }) => type === "bar" && x.every((value) => value === null) && y.every((value) => value === null);
const hatch = ({ pattern }) => pattern && JSON.stringify({ ...pattern, shape: "" });
// What all bars of a trace share.
const look = ({ type, x, y, name, showlegend, customdata, hovertemplate, hoverinfo, base, text, marker, insidetextfont, ...more }) => JSON.stringify([
  { ...more, based: Boolean(base), worded: Boolean(text) }, { ...marker, color: 0, pattern: 0 }, insidetextfont && { ...insidetextfont, color: 0 },
]);
// What a bar is, whatever its size: so that it moves to its next size, and doesn't become another (figures.css).  One that
// begins elsewhere than at 0 is a pass, which its hover text names first, or a mark of where something was, which never moves.
const identity = ({ name, orientation, x, y, base, customdata }, bar) => {
  const across = orientation === "h" ? y : x;
  return [name, across[bar], ...base ? [String(customdata?.[bar] ?? base[bar]).split(",")[0]] : []].join("|");
};
const numbered = (names) => {
  const times = new Map();
  return names.map((name) => {
    const before = times.get(name) ?? 0;
    times.set(name, before + 1);
    return before ? `${name}|${before}` : name;
  });
};
const together = (traces) => {
  const [first] = traces;
  if (traces.length === 1) return { ...first };
  const each = (get) => traces.flatMap((trace) => trace.x.map((_, bar) => {
    const found = get(trace);
    return Array.isArray(found) ? found[bar] : found;
  }));
  const pattern = traces.find(({ marker }) => marker.pattern)?.marker.pattern;
  return {
    ...first, name: "", x: each(({ x }) => x), y: each(({ y }) => y), customdata: each(({ customdata }) => customdata ?? ""),
    hovertemplate: each(({ hovertemplate }) => hovertemplate ?? ""), hoverinfo: each(({ hoverinfo }) => hoverinfo ?? "all"),
    ...(first.base && { base: each(({ base }) => base) }),
    ...(first.text && { text: each(({ text }) => text) }),
    ...(first.insidetextfont && { insidetextfont: { ...first.insidetextfont, color: each(({ insidetextfont }) => insidetextfont.color) } }),
    marker: {
      ...first.marker, color: each(({ marker }) => marker.color),
      ...(first.marker.opacity && { opacity: each(({ marker }) => marker.opacity) }),
      ...(pattern && { pattern: { ...pattern, shape: each(({ marker }) => marker.pattern?.shape ?? "") } }),
    },
  };
};
export const joined = (data, { barmode }) => {
  const runs = [];
  let before = "", texture;
  for (const trace of data) {
    if (isBare(trace)) continue;
    const mayJoin = trace.type === "bar" && barmode !== "group" && trace.x.length <= FEW, looks = mayJoin ? look(trace) : "", on = mayJoin ? hatch(trace.marker) : undefined;
    if (looks && looks === before && (!on || !texture || on === texture)) runs.at(-1).push(trace);
    else { runs.push([trace]); texture = undefined; }
    before = looks;
    texture ??= on;
  }
  return runs.map((run) => {
    const trace = together(run);
    if (trace.type === "bar") trace.ids = numbered(run.flatMap((one) => one.x.map((_, bar) => identity(one, bar))));
    // Words that say nothing cost as much as others.  A trace of words alone keeps them: without, Plotly takes away those of the
    // trace before it as well.
    if (!trace.text || trace.mode === "text" || trace.text.some((words) => words && words !== "\u00a0")) return trace;
    const { text, textposition, ...silent } = trace;
    return trace.mode ? { ...silent, mode: trace.mode.replace("+text", "") } : silent;
  });
};

// A template costs Plotly a look for each property; it has only a style for the whole and for axes.
const styled = ({ template: { layout: style }, ...layout }) => {
  const all = { ...style, ...layout };
  for (const name of ["xaxis", "yaxis", ...Object.keys(layout).filter((name) => /^[xy]axis\d+$/.test(name))]) {
    const kind = style[`${name[0]}axis`], own = layout[name] ?? {};
    all[name] = { ...kind, ...own, ...(own.title && { title: { ...kind.title, ...own.title } }) };
  }
  return all;
};

// Plotly puts what it says of a bar beside it, on a narrow page over the edge.
const inside = (label, plot) => {
  const said = label.getBoundingClientRect(), card = plot.getBoundingClientRect();
  label.style.translate = `${Math.max(card.left - said.left, 0) + Math.min(card.right - said.right, 0)}px`;
};

const NOTES = '14px system-ui, "Segoe UI", "DejaVu Sans", sans-serif';  // as in figures.css
// How wide words are, without asking the page for its layout.
const pen = document.createElement("canvas").getContext("2d");
const wide = (words) => {
  pen.font = NOTES;
  return pen.measureText(words).width;
};
// Words beside bars are text of the page too: Plotly draws each of its annotations twice.  They lie below its hover texts.
const write = (plot, notes) => {
  const drawings = plot.querySelectorAll(".main-svg");
  const place = plot.querySelector(".actmem-notes") ?? make("div", { class: "actmem-notes", "aria-hidden": "true" });
  const { _size: size, xaxis, yaxis } = plot._fullLayout;
  const before = place.named ?? new Map(), names = numbered(notes.map(({ y, xref }, which) => `${xref}|${typeof y === "string" ? y : which}`));
  place.named = new Map(names.map((name) => [name, before.get(name) ?? make("span")]));
  for (const [name, words] of before) if (!place.named.has(name)) words.remove();
  for (const [which, { text, x, y, xref, yshift = 0, yanchor = "middle", bgcolor = "none" }] of notes.entries()) {
    const words = place.named.get(names[which]);
    const wanted = xref === "paper" ? size.l + x * size.w : xaxis._offset + xaxis.d2p(x);
    const left = Math.max(0, Math.min(wanted, plot.clientWidth - Math.max(...text.split("<br>").map(wide)) - 4));  // never over the edge
    words.className = yanchor;
    const clear = yanchor === "bottom" ? 2 : 0;  // the ground of words above a bar leaves its edge
    words.style.cssText = `left:${left}px;top:${yaxis._offset + yaxis.d2p(y) - yshift - clear}px;background:${bgcolor}`;
    if (words.said !== text) words.innerHTML = words.said = text;
    if (place.children[which] !== words) place.insertBefore(words, place.children[which] ?? null);
  }
  if (!place.isConnected) drawings[drawings.length - 1].before(place);
  if (!plot.layout.yaxis2?.overlaying) return;
  const limit = plot.data.find(({ yaxis }) => yaxis === "y2");
  // Words that the line of a limit would run through begin behind it.
  const line = xaxis._offset + xaxis.d2p(limit.x[0]);
  [...place.children].forEach((words, which) => {
    const left = parseFloat(words.style.left);
    const width = wide(words.textContent), hasRoom = line + width + 8 < plot.clientWidth;  // else they lie on it
    if (notes[which].xref !== "paper" && hasRoom && left < line + 4 && line < left + width) words.style.left = `${line + 4}px`;
  });
};

// The legend is text of the page as well: it wraps, and costs Plotly a third of its time.  A swatch is 30 by 14.
const HATCHES = {
  "/": "M8 10L17 1M13 13L22 4", "x": "M8 10L17 1M13 13L22 4M8 4L17 13M13 1L22 10", "-": "M8 5H22M8 9H22", "+": "M8 5H22M8 9H22M12 1V13M18 1V13",
  "|": "M12 1V13M18 1V13", "\\": "M8 4L17 13M13 1L22 10",
  ".": "M11 4h2M16 4h2M13 7h2M18 7h2M11 10h2M16 10h2",
};
const SYMBOLS = {
  "circle": "M10 7a5 5 0 1 0 10 0a5 5 0 1 0-10 0", "square": "M10 2h10v10H10z", "diamond": "M15 1L21 7 15 13 9 7z", "triangle-up": "M15 1L21 12H9z",
  "line-ns": "M15 0V14", "line-ew": "M9 7H21",
};
const DASHES = { dash: "8 4", dot: "2 3" };
const path = (d, fill, stroke, width = 1, dash = "") => `<path d="${d}" fill="${fill}" stroke="${stroke}" stroke-width="${width}" stroke-dasharray="${dash}"/>`;
const swatch = ({ type, mode = "", line = {}, marker = {}, fill, fillcolor }) => {
  if (type === "bar") return path("M8 1h14v12h-14z", marker.color, "#222222") + path(HATCHES[marker.pattern?.shape] ?? "", "none", "#555555");
  const symbol = marker.symbol ?? "circle", isOpen = symbol.endsWith("-open"), colour = marker.color ?? line.color;
  return (fill ? path("M0 7H30V14H0z", fillcolor ?? `${line.color}80`, "none") : "")
    + (mode.includes("lines") ? path("M0 7H30", "none", line.color, line.width, DASHES[line.dash]) : "")
    + (mode.includes("markers") ? path(SYMBOLS[symbol.replace("-open", "")], isOpen ? "none" : colour, isOpen ? colour : "#222222", symbol.startsWith("line") ? 3 : 1) : "");
};
const legendOf = (data, { showlegend }) => {
  const named = data.filter((trace) => trace.name && trace.showlegend !== false);
  if (!(showlegend ?? named.length > 1)) return "";
  return named.map((trace) => `<span><svg width="30" height="14">${swatch(trace)}</svg><span>${trace.name.replaceAll("<br>", " ")}</span></span>`).join("");
};
const lettered = (data) => data.filter(({ meta }) => meta === "names").flatMap(({ text }) => text)
  .map((words, place) => `<span><b>${letter(place)}</b><span>${words.replaceAll("<br>", ", ")}</span></span>`).join("");

// What is said to a guess, without waiting for Python.
const digits = (value) => {
  const decimals = value ? Math.max(0, 2 - Number(Math.abs(value).toExponential(6).split("e")[1])) : 0;
  return value.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
};
const plain = (value) => Number.isInteger(value) ? value.toLocaleString("en") : digits(value);

const numberIn = (text, unit) => {
  let bare = text.trim();
  for (const end of [unit, "%"]) if (end && bare.endsWith(end)) bare = bare.slice(0, -end.length).trim();
  if (/^[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?$/.test(bare)) bare = bare.replaceAll(",", "");
  else if (bare.split(",").length === 2 && !bare.includes(".")) bare = bare.replace(",", ".");
  return /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(bare) && Number.isFinite(Number(bare)) ? Number(bare) : null;
};

const howFar = (guess, right) => {
  if (Math.abs(guess - right) <= 0.02 * Math.abs(right)) return "you have it";
  if (guess * right <= 0) return "not close";
  const share = guess / right;
  if (Math.abs(share - 0.5) < 0.05) return "your guess is about half of it";
  return share > 1 ? `your guess is ${digits(share)} times as much` : `${digits(1 / share)} times your guess`;
};

// answer: number, and the reply to "show me", which begins "It is 12 GiB."
export const judged = (text, unit, { number, reply }) => {
  const guess = numberIn(text, unit);
  if (guess === null) return { refused: true, reply: `✗ ${text.trim() || "An empty field"} is not a number: write it like 1.5 or 1,500` };
  const [is, ...because] = reply.split("\n");
  const said = `You said ${plain(guess)}${unit && unit !== "%" ? " " : ""}${unit}.`;
  return { guess, refused: false, reply: [`${said} ${is.slice(0, -1)}: ${howFar(guess, number)}.`, ...because].join("\n") };
};

// The line of a guess in its figure; of one beyond the axis at its end, and its words say so.  Plotly has the ends of a logarithmic
// axis as exponents.
export const guessLine = (guess, { axis, start, per, unit, shape }, layout) => {
  const along = axis[0], { range, type } = layout[`${along}axis${axis.slice(1)}`] ?? {}, isLog = type === "log";
  const value = (start + per * guess) / unit, at = isLog ? Math.log10(Math.max(value, Number.MIN_VALUE)) : value;
  const [low, high] = range ?? [at, at], place = Math.min(Math.max(at, low), high);
  const arrow = place === at ? "" : ({ x: "←→", y: "↓↑" })[along][Number(at > high)];
  const label = { ...shape.label, text: arrow ? `your guess, ${plain(guess)} ${arrow}` : shape.label.text };
  if (along === "x") label.xanchor = place < (low + high) / 2 ? "left" : "right";  // or it would leave the card
  const layer = layout.xaxis?.visible === false ? "below" : "above";  // the words of a diagram stand in front of it
  return { ...shape, label, layer, [`${along}0`]: isLog ? 10 ** place : place, [`${along}1`]: isLog ? 10 ** place : place };
};

// ask: sends Python a message, and promises the next state.  plotly: a promise of Plotly.js.
export class Figure {
  constructor(place, cell, { state, answer }, ask, plotly) {
    Object.assign(this, { place, cell, state, answer, ask, plotly, nodes: [], controls: {}, waiting: new Map(), answers: 0 });
    this.panel = make("div", { class: "actmem-controls" });
    this.message = make("p", { class: "actmem-message", role: "status" });
    this.figures = make("div", { class: "actmem-figures" });
    // A question comes before what could answer it: in the order of keys here, and on screen (figures.css).
    if (state.question) place.append(this.form());
    place.classList.toggle("actmem-asks", Boolean(state.question));
    place.classList.toggle("actmem-tall", state.drawings.reduce((sum, { layout }) => sum + layout.height, 0) > TALL);
    place.append(this.panel, this.message, this.figures);
    this.update();
    seen(place).then(() => this.draw()).then(() => new ResizeObserver(() => this.resized()).observe(place));
  }

  update() {
    for (const [name, control] of Object.entries(this.state.controls)) {
      (this.controls[name] ??= this.control(name, control)).set(control);
    }
    this.say(this.state.message ?? "");
  }

  say(words, isWaiting = false) {
    this.message.textContent = words;
    this.place.classList.toggle("actmem-waits", isWaiting);
  }

  async draw() {
    const Plotly = await this.plotly;
    const { drawings } = this.state;
    const width = this.width = this.place.clientWidth;
    for (const [number, { data, layout, config, alt }] of drawings.entries()) {
      if (!this.nodes[number]) {
        await idle();  // a first drawing takes long, and words that are ready don't wait for it
        if (drawings !== this.state.drawings) return;  // who changed it draws it
      }
      if (!this.nodes[number]) {
        const title = make("p", { class: "actmem-title", "aria-hidden": "true" });
        const plot = make("div", { class: "actmem-plot", role: "figure" });
        const legend = make("p", { class: "actmem-legend", "aria-hidden": "true" });
        this.figures.append(make("div", { class: "actmem-card" }, title, plot, legend));
        this.nodes.push({ title, plot, legend });
      }
      const { title, plot, legend } = this.nodes[number];
      // Plotly keeps the room for what is text of the page, above and below.
      const style = layout.template.layout, margin = { ...style.margin, ...layout.margin }, t = 24, b = Math.min(margin.b, 56);
      const cut = margin.t - t + margin.b - b;
      const bare = { ...layout, title: undefined, showlegend: false, autosize: false, width, height: layout.height - cut, margin: { ...margin, t, b } };
      const isDiagram = layout.xaxis?.visible === false, isNarrow = width < NARROW;
      const shown = joined(isNarrow ? worded(data, isDiagram) : data, layout);
      const node = this.nodes[number], isNew = !node.notes;
      node.notes = layout.annotations ?? [];
      const all = styled({ ...isNarrow ? fitted(bare, width) : bare, annotations: [] });
      // Room that labels once needed is kept while there are labels: drawing with other margins takes twice as long, and moves
      // what did not change.
      const room = `${width} ${layout.yaxis?.showticklabels}`;
      if (node.room === room) for (const side of "lrb") all.margin[side] = Math.max(all.margin[side], plot._fullLayout._size[side]);
      node.room = room;
      // A config that comes again is compared with the one before it, at length.
      await Plotly.react(plot, shown, all, isNew ? config : undefined);
      if (isNew) {
        write(plot, node.notes);
        plot.on("plotly_afterplot", () => write(plot, node.notes));
        plot.on("plotly_hover", () => plot.querySelectorAll(".hovertext").forEach((label) => inside(label, plot)));
      }
      // Titles are text of the page, which wraps; Plotly would cut them.  Last, because Plotly looks up the page's layout.
      const entries = legendOf(data, layout) + (isNarrow && !isDiagram ? lettered(data) : ""), words = (layout.title?.text ?? "").replaceAll("<br>", " ");
      if (legend.entries !== entries) legend.innerHTML = legend.entries = entries;
      if (title.words !== words) title.innerHTML = title.words = words;
      plot.setAttribute("aria-label", alt);
      plot.classList.toggle("actmem-diagram", isDiagram);
    }
    if (this.nodes.length) this.place.dataset.drawn = "true";
  }

  close() {
    this.plotly.then((Plotly) => this.nodes.forEach(({ plot }) => Plotly.purge(plot)));
  }

  resized() {
    const width = this.place.clientWidth;
    if (width && this.place.isConnected && Math.abs(this.width - width) > 1) this.draw();
  }

  // While an answer is awaited, only the last place of each control is kept.
  async move(control, place) {
    this.waiting.set(control, place);
    if (this.busy) return;
    this.busy = true;
    try {
      while (this.waiting.size) {
        const [[name, to]] = this.waiting;
        this.waiting.delete(name);
        await this.take(this.ask({ control: name, place: to }), this.answers);
      }
    } finally { this.busy = false; }
  }

  // What was asked before the answer came on screen is of no interest after it.
  async take(asked, answers) {
    const wait = setTimeout(() => this.say("… Python is at work; the figure follows", true), 400);
    try {
      const state = await asked;
      if (answers !== this.answers) return;
      this.state = state;
    } catch (error) {
      this.say(`✗ ${error.message}`);
      return;
    } finally { clearTimeout(wait); }
    this.update();
    await this.draw();
  }

  control(name, { label, look }) {
    const maker = { buttons: this.buttons, play: this.player }[look] ?? this.slider;
    const made = maker.call(this, name, label);
    this.panel.append(made.node);
    return made;
  }

  slider(name, label) {
    const input = make("input", { type: "range", min: "0", step: "1" });
    const value = make("output", {});
    const node = make("label", { class: "actmem-slider" }, make("span", {}, label), input, value);
    const say = (words) => { value.textContent = words; input.setAttribute("aria-valuetext", words); };
    const go = (to) => {
      input.value = String(to);
      say(this.state.controls[name].options[to]);  // at once: Python may be starting
      this.move(name, to);
    };
    input.addEventListener("input", () => go(input.valueAsNumber));
    return { node, input, go, set: ({ options, place }) => {
      input.max = String(options.length - 1);
      if (this.waiting.has(name)) return;
      input.value = String(place);
      say(options[place]);
    } };
  }

  // A slider with a button that moves it on, and two that move it by one; nothing moves by itself.
  player(name, label) {
    const made = this.slider(name, label);
    const play = make("button", { type: "button" }, "▶ Play");
    const step = (by) => {
      const to = made.input.valueAsNumber + by;
      if (to < 0 || to > Number(made.input.max)) return false;
      made.go(to);
      return true;
    };
    let timer = 0;
    const stop = () => { clearInterval(timer); timer = 0; play.textContent = "▶ Play"; };
    play.addEventListener("click", () => {
      if (timer) return stop();
      if (made.input.valueAsNumber === Number(made.input.max)) made.go(0);
      play.textContent = "❚❚ Pause";
      timer = setInterval(() => { if (!this.busy && !step(1)) stop(); }, 450);
    });
    const back = make("button", { type: "button", "aria-label": `${label}: one step back` }, "◀");
    const on = make("button", { type: "button", "aria-label": `${label}: one step on` }, "▶▏");
    back.addEventListener("click", () => { stop(); step(-1); });
    on.addEventListener("click", () => { stop(); step(1); });
    made.input.addEventListener("input", stop);
    const follow = () => { play.hidden = still.matches; if (still.matches) stop(); };
    still.addEventListener("change", follow);
    follow();
    return { ...made, node: make("div", { class: "actmem-player" }, made.node, make("span", { class: "actmem-buttons" }, play, back, on)) };
  }

  buttons(name, label) {
    const box = make("fieldset", { class: "actmem-choice" }, make("legend", {}, label));
    const group = `${this.cell}-${name}`;
    return { node: box, set: ({ options, place }) => {
      if (box.querySelectorAll("input").length !== options.length) {
        box.replaceChildren(box.firstChild, ...options.map((option, number) => {
          const input = make("input", { type: "radio", name: group });
          input.addEventListener("change", () => this.move(name, number));
          return make("label", {}, input, make("span", {}, option));
        }));
      }
      box.querySelectorAll("input")[place].checked = true;
    } };
  }

  form() {
    const { text, unit } = this.state.question;
    const input = make("input", { type: "text", inputmode: "decimal", autocomplete: "off" });
    const reply = make("output", { role: "status" });
    const show = make("button", { type: "button" }, "Show me");
    const form = make("form", { class: "actmem-guess" },
      make("label", {}, make("span", { class: "question" }, text), make("span", {}, input, ` ${unit}`)),
      make("button", { type: "submit" }, "This is my guess"), show, reply);
    const say = ({ guess, reply: words, refused = false }) => {
      reply.textContent = words;
      reply.classList.toggle("refused", refused);
      input.setAttribute("aria-invalid", String(refused));
      if (refused) return;
      const { line } = this.answer;
      this.answers += 1;
      this.waiting.clear();
      this.state = { ...this.answer, drawings: this.answer.drawings.map((drawing, number) => {
        if (guess === undefined || line?.figure !== number) return drawing;
        const { layout } = drawing;
        return { ...drawing, layout: { ...layout, shapes: [...layout.shapes ?? [], guessLine(guess, line, layout)] } };
      }) };
      painted().then(() => { this.update(); return this.draw(); });  // the words first
      this.ask({ answer: true }).catch(() => {});  // so that Python's sliders go on from here
    };
    // The browser keeps a guess for the next time, unless it may not store anything.
    const kept = (use) => { try { return use(localStorage, `actmem guess: ${text}`); } catch { return null; } };
    input.value = kept((storage, name) => storage.getItem(name)) ?? "";
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      kept((storage, name) => storage.setItem(name, input.value));
      say(judged(input.value, unit, this.answer));
    });
    show.addEventListener("click", () => say(this.answer));
    return form;
  }
}

const seen = (node) => new Promise((done) => {
  const watch = new IntersectionObserver((entries) => {
    if (entries.some((entry) => entry.isIntersecting)) { watch.disconnect(); done(); }
  }, { rootMargin: "400px" });
  watch.observe(node);
});
// Not later than in a moment: a page whose Python starts is hardly ever idle.
export const idle = () => new Promise((done) => globalThis.requestIdleCallback ? requestIdleCallback(done, { timeout: 300 }) : setTimeout(done));
export const painted = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
