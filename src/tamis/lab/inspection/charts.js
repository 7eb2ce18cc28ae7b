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

/* Charts: SVG in a box of 520 units by `height`. */
function frame(box, height, label) {
  const svg = element("svg:svg", { viewBox: `0 0 520 ${height}`, role: "img", "aria-label": label });
  box.replaceChildren(svg);
  return svg;
}

const titled = (made, text) => { made.append(element("svg:title", {}, text)); return made; };

function yAxis(svg, area, top, form) {
  for (let i = 0; i <= 4; i++) {
    const y = area.bottom - ((area.bottom - area.top) * i) / 4;
    svg.append(element("svg:line", { x1: area.left, x2: area.right, y1: y, y2: y, stroke: "var(--line)" }));
    svg.append(element("svg:text", { x: area.left - 8, y: y + 4, "text-anchor": "end" }, form((top * i) / 4)));
  }
}

function key(box, ...entries) {
  const line = element("div", { class: "key" });
  for (const [name, colour] of entries) line.append(element("span", {}, element("i", { style: `background:${colour}` }), name));
  box.prepend(line);
}

function drawLayers(box, layers, show) {
  const svg = frame(box, 230, "Recall and top-1 hit by layer"), area = { left: 48, right: 516, top: 8, bottom: 200 };
  yAxis(svg, area, 1, (value) => `${Math.round(value * 100)}%`);
  const slot = (area.right - area.left) / Math.max(1, layers.length), high = area.bottom - area.top;
  const width = Math.min(34, slot * 0.36), every = Math.ceil(layers.length / 16);
  layers.forEach((layer, i) => {
    const middle = area.left + slot * (i + 0.5);
    const group = element("svg:g", { style: "cursor:pointer" });
    [["recall", "var(--accent)", -1], ["top1", "var(--third)", 0]].forEach(([name, colour, side]) => {
      const value = layer[name] ?? 0;
      group.append(element("svg:rect", { x: middle + side * width + side + (side ? 0 : 1), y: area.bottom - value * high, width: Math.max(1, width), height: Math.max(0, value * high), rx: 2, fill: colour }));
    });
    titled(group, `Layer ${layer.layer}: recall ${percent(layer.recall ?? 0)}, top-1 hit ${percent(layer.top1 ?? 0)}`);
    group.addEventListener("click", () => show(layer.layer));
    svg.append(group);
    if (i % every === 0) svg.append(element("svg:text", { x: middle, y: area.bottom + 18, "text-anchor": "middle" }, layer.layer));
  });
  key(box, ["recall", "var(--accent)"], ["top-1 hit", "var(--third)"]);
}

function drawPosition(box, layer, tokens) {
  box.parentElement.querySelector("p").textContent = `Recall of layer ${layer.layer} along the prompt; recall is 100% while the context is shorter than top-k.`;
  const svg = frame(box, 230, "Recall by position"), area = { left: 48, right: 516, top: 8, bottom: 200 };
  yAxis(svg, area, 1, (value) => `${Math.round(value * 100)}%`);
  for (const [name, colour] of [["top1", "var(--third)"], ["recall", "var(--accent)"]]) {
    const values = layer.positions[name];
    const points = values.map((value, i) => (value === null ? null : [area.left + ((i + 0.5) / values.length) * (area.right - area.left), area.bottom - value * (area.bottom - area.top)]));
    const path = points.filter(Boolean).map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
    svg.append(element("svg:path", { d: path, fill: "none", stroke: colour, "stroke-width": name === "recall" ? 2.2 : 1.4, "stroke-linejoin": "round" }));
    points.forEach((point, i) => point && svg.append(titled(element("svg:circle", { cx: point[0], cy: point[1], r: 6, fill: "transparent" }), `${name === "recall" ? "recall" : "top-1 hit"} ${percent(values[i])} around ${number(Math.round(((i + 0.5) / values.length) * tokens))}`)));
  }
  for (let i = 0; i <= 4; i++) {
    const x = area.left + ((area.right - area.left) * i) / 4;
    svg.append(element("svg:text", { x, y: area.bottom + 18, "text-anchor": i === 0 ? "start" : i === 4 ? "end" : "middle" }, number(Math.round((tokens * i) / 4))));
  }
  key(box, ["recall", "var(--accent)"], ["top-1 hit", "var(--third)"]);
}

function drawDistance(box, layer, bins) {
  box.parentElement.querySelector("p").textContent = `Distance of layer ${layer.layer}'s selected candidates (bars) vs. uniform selection (line).`;
  const svg = frame(box, 240, "Distances of selected candidates"), area = { left: 48, right: 516, top: 8, bottom: 200 };
  const share = (counts) => counts.map((count) => count / Math.max(1, counts.reduce((a, b) => a + b, 0)));
  const chosen = share(layer.distances).slice(0, bins.length), possible = share(layer.possible_distances).slice(0, bins.length);
  const top = Math.ceil(Math.max(...chosen, ...possible, 0.04) * 25) / 25;
  yAxis(svg, area, top, (value) => `${+(value * 100).toFixed(1)}%`);
  const slot = (area.right - area.left) / bins.length, high = (area.bottom - area.top) / top;
  let outline = "";
  bins.forEach((name, i) => {
    const x = area.left + slot * i;
    const bar = element("svg:rect", { x: x + slot * 0.12, y: area.bottom - chosen[i] * high, width: slot * 0.76, height: chosen[i] * high, rx: 2, fill: "var(--accent)" });
    svg.append(titled(bar, `distance ${name}: ${percent(chosen[i])} of the selected, ${percent(possible[i])} of the visible`));
    outline += `${i ? "L" : "M"}${x} ${area.bottom - possible[i] * high}L${x + slot} ${area.bottom - possible[i] * high}`;
    if (i % Math.ceil(bins.length / 9) === 0) svg.append(element("svg:text", { x: x + slot / 2, y: area.bottom + 18, "text-anchor": "middle" }, name.split(" to ")[0]));
  });
  svg.append(element("svg:path", { d: outline, fill: "none", stroke: "var(--second)", "stroke-width": 1.6 }));
  svg.append(element("svg:text", { x: (area.left + area.right) / 2, y: area.bottom + 36, "text-anchor": "middle" }, "tokens behind the query, from"));
  key(box, ["selected", "var(--accent)"], ["visible", "var(--second)"]);
}

function drawOverlap(box, overlap, show) {
  const count = overlap.layers.length;
  if (!overlap.queries || count < 2) {
    const why = count < 2 ? "Only one layer selects." : "No query has more candidates than top-k, so all layers select the same.";
    box.replaceChildren(element("p", {}, why));
    return;
  }
  const svg = frame(box, 300, "Overlap between layers"), left = 48, side = Math.min(270, (270 / count) * count), cell = side / count;
  const colours = ramp(), every = Math.ceil(count / 16);
  const css = (value) => { const c = colours[Math.round(value * 255)]; return `rgb(${c & 255} ${(c >> 8) & 255} ${(c >> 16) & 255})`; };
  const known = overlap.iou.flatMap((line, i) => line.filter((value, j) => i !== j && value !== null));
  overlap.iou.forEach((line, i) => {
    line.forEach((value, j) => {
      const fill = value === null ? "none" : css(value);
      const square = element("svg:rect", { x: left + j * cell, y: 4 + i * cell, width: Math.max(0.5, cell - 1), height: Math.max(0.5, cell - 1), rx: Math.min(3, cell / 8), fill });
      const text = value === null ? "select different things" : `${percent(value)} in common`;
      titled(square, `Layers ${overlap.layers[i]} and ${overlap.layers[j]}: ${text}`);
      svg.append(square);
      if (value !== null && cell >= 36) {
        const light = matchMedia("(prefers-color-scheme: dark)").matches ? value > 0.62 : value < 0.5;
        svg.append(element("svg:text", { x: left + (j + 0.5) * cell - 0.5, y: 8 + (i + 0.5) * cell, "text-anchor": "middle", style: `fill:${light ? "#14211f" : "#f4f7f6"};pointer-events:none` }, value.toFixed(2)));
      }
    });
    if (i % every === 0) {
      svg.append(element("svg:text", { x: left - 8, y: 8 + (i + 0.5) * cell, "text-anchor": "end" }, overlap.layers[i]));
      svg.append(element("svg:text", { x: left + (i + 0.5) * cell, y: side + 20, "text-anchor": "middle" }, overlap.layers[i]));
    }
  });
  if (known.length) {
    const mean = known.reduce((a, b) => a + b, 0) / known.length;
    const lines = [["mean of different layers", percent(mean)], ["most alike", percent(Math.max(...known))], ["least alike", percent(Math.min(...known))]];
    lines.forEach(([name, value], i) => {
      svg.append(element("svg:text", { x: left + side + 26, y: 26 + i * 46, style: "font-size:20px;fill:var(--ink)" }, value));
      svg.append(element("svg:text", { x: left + side + 26, y: 43 + i * 46 }, name));
    });
  }
}
