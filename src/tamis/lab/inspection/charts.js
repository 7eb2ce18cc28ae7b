const number = (value) => value.toLocaleString("en");
const percent = (value) => `${(100 * value).toFixed(1)}%`;
const scored = (value) => (Math.abs(value) >= 1e-3 || value === 0 ? value.toFixed(3) : value.toExponential(2));

function element(name, attributes = {}, ...children) {
  const made = name.startsWith("svg:")
    ? document.createElementNS("http://www.w3.org/2000/svg", name.slice(4))
    : document.createElement(name);
  // The page's policy allows no style attributes; a script may set styles as properties.
  for (const [key, value] of Object.entries(attributes)) key === "style" ? (made.style.cssText = value) : made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const titled = (made, text) => { made.append(element("svg:title", {}, text)); return made; };

/* Charts are drawn in CSS pixels at the width of their card, so that texts keep their size in a narrow window. */
class Chart {
  constructor(box, height, label, names) {
    this.box = box;
    this.width = Math.max(240, Math.floor(box.clientWidth));
    this.svg = element("svg:svg", { viewBox: `0 0 ${this.width} ${height}`, role: "img", "aria-label": label });
    box.replaceChildren(this.svg);
    this.left = 62;
    this.right = this.width - 4;
    this.top = 10;
    this.bottom = height - 44;
    const middle = (this.top + this.bottom) / 2;
    this.text(names.y, { x: 14, y: middle, "text-anchor": "middle", transform: `rotate(-90 14 ${middle})`, class: "axis-y" });
    this.text(names.x, { x: (this.left + this.right) / 2, y: height - 6, "text-anchor": "middle", class: "axis-x" });
  }

  get across() { return this.right - this.left; }
  get high() { return this.bottom - this.top; }

  add(name, attributes, title) {
    const made = element(`svg:${name}`, attributes);
    this.svg.append(title === undefined ? made : titled(made, title));
    return made;
  }

  text(content, attributes) { this.svg.append(element("svg:text", attributes, String(content))); }

  /* Four lines across, up to `top`. */
  scale(top, form) {
    for (let i = 0; i <= 4; i++) {
      const y = this.bottom - (this.high * i) / 4;
      this.add("line", { x1: this.left, x2: this.right, y1: y, y2: y, stroke: "var(--line)" });
      this.text(form((top * i) / 4), { x: this.left - 8, y: y + 4, "text-anchor": "end" });
    }
  }

  tick(x, content, anchor = "middle") { this.text(content, { x, y: this.bottom + 18, "text-anchor": anchor }); }

  /* A pattern of the chart, beside its colour: what is told apart by colour alone is lost on many readers. */
  fill(name) {
    const { colour, pattern } = FILLS[name];
    if (!pattern) return colour;
    const id = `${this.box.id}-${name}`;
    if (!this.svg.querySelector(`#${id}`)) this.svg.prepend(element("svg:defs", {}, patternOf(id, colour, pattern)));
    return `url(#${id})`;
  }

  /* Swatches above the chart, off the lines: [name, fill] or, for a line, [name, colour, dashes]. */
  key(...entries) {
    const line = element("div", { class: "key" });
    entries.forEach(([name, fill, dashes]) => {
      const swatch = element("svg:svg", { viewBox: "0 0 18 10", width: 18, height: 10, "aria-hidden": "true" });
      if (dashes === undefined) swatch.append(element("svg:rect", { width: 18, height: 10, rx: 2, fill }));
      else swatch.append(element("svg:line", { x1: 0, x2: 18, y1: 5, y2: 5, stroke: fill, "stroke-width": 2.2, "stroke-dasharray": dashes }));
      line.append(element("span", {}, swatch, name));
    });
    this.box.prepend(line);
  }
}

const FILLS = {
  recall: { colour: "var(--accent)" },
  top1: { colour: "var(--third)", pattern: "M-1 1l2 -2M0 6l6 -6M5 7l2 -2" },
  window: { colour: "var(--accent)" },
  selected: { colour: "var(--third)", pattern: "M-1 1l2 -2M0 6l6 -6M5 7l2 -2" },
  unselected: { colour: "var(--second)", pattern: "M3 0v6M0 3h6" },
  sink: { colour: "var(--soft)", pattern: "M0 3h6" },
};

function patternOf(id, colour, path) {
  const box = { id, width: 6, height: 6, patternUnits: "userSpaceOnUse" };
  return element("svg:pattern", box, element("svg:rect", { width: 6, height: 6, fill: colour }), element("svg:path", { d: path, stroke: "var(--card)", "stroke-width": 1.3, fill: "none" }));
}

const hundred = (value) => `${Math.round(value * 100)}%`;

/* A slot for each layer, with a number under as many as there is room for. */
function layerSlots(chart, layers, draw) {
  const slot = chart.across / Math.max(1, layers.length), every = Math.ceil(layers.length / (chart.across / 30));
  layers.forEach((layer, i) => {
    const middle = chart.left + slot * (i + 0.5);
    draw(layer, middle, slot);
    if (i % every === 0) chart.tick(middle, layer.layer);
  });
}

const listed = (layers, tell) => layers.slice(0, 16).map((layer) => `layer ${layer.layer}: ${tell(layer)}`).join("; ");

function drawLayers(box, layers, show) {
  const tell = (layer) => `recall ${percent(layer.recall ?? 0)}, top-1 hit ${percent(layer.top1 ?? 0)}`;
  const chart = new Chart(box, 250, `Recall and top-1 hit by layer. ${listed(layers, tell)}`, { x: "layer", y: "share (%)" });
  chart.scale(1, hundred);
  layerSlots(chart, layers, (layer, middle, slot) => {
    const width = Math.min(34, slot * 0.36);
    const group = chart.add("g", { style: "cursor:pointer" }, `Layer ${layer.layer}: ${tell(layer)}`);
    [["recall", -1], ["top1", 0]].forEach(([name, side]) => {
      const tall = (layer[name] ?? 0) * chart.high;
      group.append(element("svg:rect", { x: middle + side * width + side + (side ? 0 : 1), y: chart.bottom - tall, width: Math.max(1, width), height: tall, rx: 2, fill: chart.fill(name) }));
    });
    group.addEventListener("click", () => show(layer.layer));
  });
  chart.key(["recall", chart.fill("recall")], ["top-1 hit", chart.fill("top1")]);
}

const PARTS = [["window", "window"], ["selected", "selected entries"], ["unselected", "entries not selected"], ["sink", "sink"]];

function drawParts(box, layers, show) {
  if (!box) return;
  const found = layers.filter((layer) => layer.window_share !== null);
  const tell = (layer) => PARTS.map(([part, name]) => `${name} ${percent(layer[`${part}_share`])}`).join(", ");
  const chart = new Chart(box, 250, `Shares of dense attention's weight by layer. ${listed(found, tell)}`, { x: "layer", y: "share of the weight (%)" });
  chart.scale(1, hundred);
  layerSlots(chart, found, (layer, middle, slot) => {
    const width = Math.max(1, Math.min(72, slot * 0.7));
    const group = chart.add("g", { style: "cursor:pointer" }, `Layer ${layer.layer}: ${tell(layer)}`);
    let from = chart.bottom;
    for (const [part] of PARTS) {
      const tall = layer[`${part}_share`] * chart.high;
      group.append(element("svg:rect", { x: middle - width / 2, y: from - tall, width, height: Math.max(0, tall - 1), fill: chart.fill(part) }));
      if (width >= 60 && slot - width > 110 && tall > 3) group.append(element("svg:text", { x: middle + width / 2 + 6, y: from - tall / 2 + 4 }, percent(layer[`${part}_share`])));
      from -= tall;
    }
    group.addEventListener("click", () => show(layer.layer));
  });
  chart.key(...PARTS.map(([part, name]) => [name, chart.fill(part)]));
}

function drawPosition(box, layer, tokens) {
  box.parentElement.querySelector("p").textContent = `Recall of layer ${layer.layer} along the prompt; recall is 100% while the context is shorter than top-k.`;
  const chart = new Chart(box, 250, `Recall and top-1 hit of layer ${layer.layer} by position in the prompt`, { x: "position of the query (tokens)", y: "share (%)" });
  chart.scale(1, hundred);
  const lines = [["top1", "top-1 hit", "var(--third)", "4 2", 1.4], ["recall", "recall", "var(--accent)", "none", 2.2]];
  for (const [name, label, colour, dashes, width] of lines) {
    const values = layer.positions[name];
    const points = values.map((value, i) => (value === null ? null : [chart.left + ((i + 0.5) / values.length) * chart.across, chart.bottom - value * chart.high]));
    const path = points.filter(Boolean).map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
    chart.add("path", { d: path, fill: "none", stroke: colour, "stroke-width": width, "stroke-dasharray": dashes, "stroke-linejoin": "round", class: "series" });
    points.forEach((point, i) => point && chart.add("circle", { cx: point[0], cy: point[1], r: 6, fill: "transparent" }, `${label} ${percent(values[i])} around position ${number(Math.round(((i + 0.5) / values.length) * tokens))}`));
  }
  const steps = chart.across < 300 ? 2 : 4;
  for (let i = 0; i <= steps; i++) {
    chart.tick(chart.left + (chart.across * i) / steps, number(Math.round((tokens * i) / steps)), i === 0 ? "start" : i === steps ? "end" : "middle");
  }
  chart.key(...lines.slice().reverse().map(([, label, colour, dashes]) => [label, colour, dashes]));
}

function drawDistance(box, layer, bins) {
  box.parentElement.querySelector("p").textContent = `Distance of layer ${layer.layer}'s selected candidates (bars) vs. uniform selection (line).`;
  const chart = new Chart(box, 250, `Distances of layer ${layer.layer}'s selected candidates`, { x: "distance behind the query, from (tokens)", y: "share of candidates (%)" });
  const share = (counts) => counts.map((count) => count / Math.max(1, counts.reduce((a, b) => a + b, 0)));
  const chosen = share(layer.distances).slice(0, bins.length), possible = share(layer.possible_distances).slice(0, bins.length);
  const top = Math.ceil(Math.max(...chosen, ...possible, 0.04) * 25) / 25;
  chart.scale(top, (value) => `${+(value * 100).toFixed(1)}%`);
  const slot = chart.across / bins.length, high = chart.high / top, every = Math.ceil(bins.length / (chart.across / 44));
  let outline = "";
  bins.forEach((name, i) => {
    const x = chart.left + slot * i;
    const bar = { x: x + slot * 0.12, y: chart.bottom - chosen[i] * high, width: slot * 0.76, height: chosen[i] * high, rx: 2, fill: "var(--accent)" };
    chart.add("rect", bar, `distance ${name}: ${percent(chosen[i])} of the selected, ${percent(possible[i])} of all visible candidates`);
    outline += `${i ? "L" : "M"}${x} ${chart.bottom - possible[i] * high}L${x + slot} ${chart.bottom - possible[i] * high}`;
    if (i % every === 0) chart.tick(x + slot / 2, name.split(" to ")[0]);
  });
  chart.add("path", { d: outline, fill: "none", stroke: "var(--second)", "stroke-width": 1.8, class: "series" });
  chart.key(["selected", "var(--accent)"], ["uniform selection", "var(--second)", "none"]);
}

function drawOverlap(box, overlap) {
  const count = overlap.layers.length;
  if (overlap.empty) {
    box.replaceChildren(element("p", { class: "empty" }, overlap.empty));
    return;
  }
  const side = Math.min(280, Math.max(180, box.clientWidth - 66)), cell = side / count;
  const chart = new Chart(box, side + 54, "Overlap between layers", { x: "layer", y: "layer" });
  chart.svg.setAttribute("viewBox", `0 0 ${side + 66} ${side + 54}`);
  chart.svg.style.width = `${side + 66}px`;
  chart.svg.querySelector(".axis-x").setAttribute("x", chart.left + side / 2);
  const colours = ramp(), every = Math.ceil(count / 12);
  const css = (value) => { const c = colours[Math.round(value * 255)]; return `rgb(${c & 255} ${(c >> 8) & 255} ${(c >> 16) & 255})`; };
  const known = overlap.iou.flatMap((line, i) => line.filter((value, j) => i !== j && value !== null));
  overlap.iou.forEach((line, i) => {
    line.forEach((value, j) => {
      const fill = value === null ? "none" : css(value);
      const text = value === null ? "one selects tokens, the other entries" : `${percent(value)} in common`;
      const x = chart.left + j * cell, y = chart.top + i * cell, size = Math.max(0.5, cell - 1);
      chart.add("rect", { x, y, width: size, height: size, rx: Math.min(3, cell / 8), fill }, `Layers ${overlap.layers[i]} and ${overlap.layers[j]}: ${text}`);
      if (value !== null && cell >= 36) {
        const light = matchMedia("(prefers-color-scheme: dark)").matches ? value > 0.62 : value < 0.5;
        chart.text(value.toFixed(2), { x: x + cell / 2 - 0.5, y: y + cell / 2 + 4, "text-anchor": "middle", style: `fill:${light ? "#14211f" : "#f4f7f6"};pointer-events:none` });
      }
    });
    if (i % every === 0) {
      chart.text(overlap.layers[i], { x: chart.left - 8, y: chart.top + (i + 0.5) * cell + 4, "text-anchor": "end" });
      chart.tick(chart.left + (i + 0.5) * cell, overlap.layers[i]);
    }
  });
  if (known.length) {
    const mean = known.reduce((a, b) => a + b, 0) / known.length;
    const facts = [["mean of different layers", mean], ["most alike", Math.max(...known)], ["least alike", Math.min(...known)]];
    box.append(element("div", { class: "facts" }, ...facts.map(([name, value]) => element("div", {}, element("b", {}, percent(value)), name))));
  }
}
