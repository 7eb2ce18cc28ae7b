const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const number = (value) => value.toLocaleString("en");
const percent = (value) => `${(100 * value).toFixed(1)}%`;
const scored = (value) => (Math.abs(value) >= 1e-3 || value === 0 ? value.toFixed(3) : value.toExponential(2));
const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;

function element(name, attributes = {}, ...children) {
  const made = name.startsWith("svg:")
    ? document.createElementNS("http://www.w3.org/2000/svg", name.slice(4))
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function start() {
  const keptCount = data.kept ? data.kept.length : data.tokens.length;
  const heat = new HeatMap($("heat"), data.tokens.length, data.kept);
  const unpacked = new Map();
  let now = null;

  const arrays = (layer) => {
    if (!unpacked.has(layer)) {
      const about = data.layers.find((one) => one.layer === layer);
      unpacked.set(layer, LayerArrays.unpack(about, keptCount));
    }
    return unpacked.get(layer);
  };

  async function show(layer) {
    const own = await arrays(layer);
    const source = own.about.shares === null ? own : await arrays(own.about.shares);
    now = own.about;
    $("layer").value = layer;
    heat.show(own, source);
    for (const row of document.querySelectorAll("#layers tbody tr")) row.classList.toggle("now", row.dataset.layer === String(layer));
    drawScale();
    drawMini();
    drawPosition($("chart-position"), now);
    drawDistance($("chart-distance"), now);
    listPinned();
    document.body.dataset.shown = layer;
  }

  function drawScale() {
    const names = { score: "Score", share: "Share selected", mass: "Dense attention" };
    const ends = {
      score: ["lowest selected", "highest of its query"],
      share: ["none", "all"],
      mass: ["none", "most of its row"],
    };
    $("scale-name").textContent = names[heat.mode];
    [$("scale-low").textContent, $("scale-high").textContent] = ends[heat.mode];
    const canvas = $("scale"), context = canvas.getContext("2d");
    canvas.width = 256;
    canvas.height = 1;
    const image = context.createImageData(256, 1);
    const colours = ramp();
    const pixels = new Uint32Array(image.data.buffer);
    for (let i = 0; i < 256; i++) pixels[i] = colours[heat.mode === "score" ? 64 + Math.round((i * 191) / 255) : i];
    context.putImageData(image, 0, 0);
  }

  function drawMini() {
    if (!heat.layer) return;
    const canvas = $("mini"), { about, maps } = heat.layer, size = 256;
    canvas.width = canvas.height = size;
    const context = canvas.getContext("2d"), image = context.createImageData(size, size);
    const pixels = new Uint32Array(image.data.buffer), colours = ramp(), map = maps[heat.mode];
    for (let y = 0; y < size; y++) {
      const row = Math.floor((y / size) * about.grid) * about.columns;
      for (let x = 0; x <= y; x++) pixels[y * size + x] = colours[map[row + Math.floor((x / size) * about.columns)]];
    }
    context.putImageData(image, 0, 0);
    const { width, height, scale } = heat.plot, unit = size / heat.tokens;
    context.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--second");
    context.lineWidth = 2;
    context.strokeRect(
      heat.view.x * unit + 1, heat.view.y * unit + 1,
      Math.min(size, (width / scale) * unit) - 2, Math.min(size, (height / scale) * unit) - 2,
    );
  }
  heat.changed = drawMini;

  const shown = (position) => data.tokens[position];
  const context = (position, count = 4) =>
    (position > count ? "… " : "") + data.tokens.slice(Math.max(0, position - count), position).join(" ");
  const placeText = (place) => data.tokens.slice(place * now.ratio, (place + 1) * now.ratio).join(" ");
  const placeName = (place) =>
    now.ratio === 1 ? number(place) : `${number(place * now.ratio)}–${number(place * now.ratio + now.ratio - 1)}`;

  const row = (name, ...value) => [element("dt", {}, name), element("dd", {}, ...value)];
  const token = (text) => element("span", { class: "token" }, text);

  /* What lies under a pixel: one pair if it is large enough, else what is selected of all pairs there. */
  function under(spot) {
    const rows = heat.rows, query = Math.floor(spot.y), place = Math.floor(spot.x / now.ratio);
    if (spot.x >= Math.floor((query + 1) / now.ratio) * now.ratio && spot.size < 1) {
      return [...row("query", token(shown(query)), ` at ${number(query)}`), ...row("", "cannot see this")];
    }
    const queries = [query, query + Math.max(1, Math.round(spot.size))];
    const places = [place, place + Math.max(1, Math.round(spot.size / now.ratio))];
    let count = 0, best = -1, bestRow = -1, known = 0;
    for (let r = heat.rowFrom(queries[0]); r < Math.min(heat.rowFrom(queries[1]), heat.rowCount); r++) {
      known++;
      for (let i = rows.seek(r, places[0]); i < rows.starts[r + 1] && rows.places[i] < places[1]; i++) {
        count++;
        if (best < 0 || rows.score(r, i) > rows.score(bestRow, best)) [best, bestRow] = [i, r];
      }
    }
    if (!known) return block(query, place);
    const single = queries[1] - queries[0] === 1 && places[1] - places[0] === 1;
    if (best >= 0) {
      const at = heat.queryOf(bestRow), where = rows.places[best];
      const found = [...row("query", token(shown(at)), ` at ${number(at)}`)];
      found.push(...row(now.ratio === 1 ? "token" : "entry", token(placeText(where)), ` at ${placeName(where)}`));
      found.push(...row("score", scored(rows.score(bestRow, best)), `, rank ${rank(bestRow, best)} of ${number(rows.starts[bestRow + 1] - rows.starts[bestRow])}`));
      found.push(...row("distance", number(at - (where * now.ratio + now.ratio - 1))));
      if (!single && count > 1) found.push(...row("", `best of ${number(count)} selected here`));
      return found;
    }
    const r = heat.rowFrom(query);
    if (!single) {
      return [
        ...row("queries", token(shown(query)), ` at ${number(query)} to ${number(queries[1] - 1)}`),
        ...row(now.ratio === 1 ? "tokens" : "entries", token(placeText(place)), ` at ${number(place * now.ratio)} to ${number(places[1] * now.ratio - 1)}`),
        ...row("score", "nothing selected here"),
      ];
    }
    return [
      ...row("query", token(shown(query)), ` at ${number(query)}`),
      ...row(now.ratio === 1 ? "token" : "entry", token(placeText(place)), ` at ${placeName(place)}`),
      ...row("score", `below the cut at ${scored(rows.low[r])}: not selected`),
    ];
  }

  function rank(r, at) {
    const rows = heat.rows;
    let better = 1;
    for (let i = rows.starts[r]; i < rows.starts[r + 1]; i++) if (rows.levels[i] > rows.levels[at]) better++;
    return number(better);
  }

  /* Queries whose selections are not in this file one by one. */
  function block(query, place) {
    const { about, maps } = heat.layer;
    const r = Math.floor((query / heat.tokens) * about.grid), c = Math.floor((place / about.places) * about.columns);
    const at = r * about.columns + c, level = maps.score[at];
    const from = Math.ceil((r * heat.tokens) / about.grid), to = Math.ceil(((r + 1) * heat.tokens) / about.grid) - 1;
    const found = [...row("queries", `${number(from)}–${number(to)}`), ...row("around", token(placeText(place)), ` at ${placeName(place)}`)];
    found.push(...row("selected", level ? `${percent((maps.share[at] / 255) ** 2)} of the pairs here` : "nothing"));
    if (level) found.push(...row("score", `at most ${scored(about.bestLow + ((about.bestHigh - about.bestLow) * (level - 1)) / 254)}`));
    return found;
  }

  function showTip(px, py) {
    const spot = heat.locate(px, py), tip = $("tip");
    tip.hidden = !spot || !now;
    if (tip.hidden) return;
    tip.replaceChildren(element("dl", {}, ...under(spot)));
    const box = $("heat");
    tip.style.left = `${Math.max(0, px + 18 + tip.offsetWidth > box.clientWidth ? px - tip.offsetWidth - 14 : px + 18)}px`;
    tip.style.top = `${Math.max(0, Math.min(py + 16, box.clientHeight - tip.offsetHeight - 6))}px`;
  }

  function listPinned() {
    const box = $("picked");
    box.replaceChildren();
    const r = heat.pinned === null ? -1 : heat.rowFrom(heat.pinned);
    if (r < 0 || r >= heat.rowCount || heat.queryOf(r) !== heat.pinned) return;
    const rows = heat.rows, query = heat.pinned;
    const order = Array.from({ length: rows.starts[r + 1] - rows.starts[r] }, (_, i) => rows.starts[r] + i);
    order.sort((a, b) => rows.levels[b] - rows.levels[a] || a - b);
    box.append(element("h3", {}, `Query ${number(query)} selects ${number(order.length)}`));
    box.append(element("div", { class: "note" }, context(query), " ", token(shown(query))));
    const list = element("ol");
    for (const i of order.slice(0, 12)) {
      const where = element("span", { class: "where" }, ` ${placeName(rows.places[i])}`);
      list.append(element("li", {}, element("span", {}, token(placeText(rows.places[i])), where), element("span", {}, scored(rows.score(r, i)))));
    }
    box.append(list);
    if (order.length > 12) box.append(element("div", { class: "note" }, `and ${number(order.length - 12)} more`));
  }

  function pin(query) {
    // The nearest query that is in this file.
    const r = Math.min(heat.rowFrom(query), heat.rowCount - 1);
    heat.pinned = heat.queryOf(r);
    heat.redraw();
    listPinned();
  }

  let grabbed = null;
  const canvas = $("heat");
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    heat.zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) / 150), event.offsetX, event.offsetY);
    showTip(event.offsetX, event.offsetY);
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    grabbed = { x: event.offsetX, y: event.offsetY, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (grabbed) {
      const dx = grabbed.x - event.offsetX, dy = grabbed.y - event.offsetY;
      if (grabbed.moved || Math.hypot(dx, dy) > 3) {
        canvas.classList.add("dragging");
        heat.move(dx, dy);
        grabbed = { x: event.offsetX, y: event.offsetY, moved: true };
        $("tip").hidden = true;
      }
      return;
    }
    showTip(event.offsetX, event.offsetY);
  });
  canvas.addEventListener("pointerup", (event) => {
    const spot = heat.locate(event.offsetX, event.offsetY);
    if (grabbed && !grabbed.moved && spot) pin(Math.floor(spot.y));
    grabbed = null;
    canvas.classList.remove("dragging");
  });
  canvas.addEventListener("pointerleave", () => { if (!grabbed) $("tip").hidden = true; });
  canvas.addEventListener("keydown", (event) => {
    const keys = {
      ArrowLeft: () => heat.move(-60, 0), ArrowRight: () => heat.move(60, 0),
      ArrowUp: () => heat.move(0, -60), ArrowDown: () => heat.move(0, 60),
      "+": () => heat.zoom(0.7), "=": () => heat.zoom(0.7), "-": () => heat.zoom(1 / 0.7), 0: () => heat.reset(),
    };
    if (keys[event.key] && !event.ctrlKey && !event.metaKey) {
      keys[event.key]();
      event.preventDefault();
    }
  });
  $("mini").addEventListener("click", (event) => {
    const unit = heat.tokens / $("mini").clientWidth;
    heat.centre(event.offsetX * unit, event.offsetY * unit);
  });
  $("in").addEventListener("click", () => heat.zoom(0.5));
  $("out").addEventListener("click", () => heat.zoom(2));
  $("reset").addEventListener("click", () => heat.reset());
  $("modes").addEventListener("change", (event) => {
    heat.mode = event.target.value;
    heat.redraw();
    drawScale();
    drawMini();
  });
  for (const layer of data.layers) {
    const shares = layer.shares === null ? "" : `, shares layer ${layer.shares}`;
    $("layer").append(element("option", { value: layer.layer }, `${layer.layer}${shares}`));
  }
  $("layer").addEventListener("change", () => show(Number($("layer").value)));
  for (const line of document.querySelectorAll("#layers tbody tr[data-layer]")) {
    line.addEventListener("click", () => show(Number(line.dataset.layer)));
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawScale(); drawMini(); drawOverlap($("chart-overlap"), data.overlap, show); });

  drawLayers($("chart-layers"), data.layers, show);
  drawOverlap($("chart-overlap"), data.overlap, show);
  if (data.layers.length) show(data.layers[0].layer).then(() => pin(data.tokens.length - 1));
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

function drawPosition(box, layer) {
  document.getElementById("position-note").textContent = `Recall of layer ${layer.layer} along the prompt; up to top-k it is all that there is.`;
  const svg = frame(box, 230, "Recall by position"), area = { left: 48, right: 516, top: 8, bottom: 200 };
  yAxis(svg, area, 1, (value) => `${Math.round(value * 100)}%`);
  for (const [name, colour] of [["top1", "var(--third)"], ["recall", "var(--accent)"]]) {
    const values = layer.positions[name];
    const points = values.map((value, i) => (value === null ? null : [area.left + ((i + 0.5) / values.length) * (area.right - area.left), area.bottom - value * (area.bottom - area.top)]));
    const path = points.filter(Boolean).map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
    svg.append(element("svg:path", { d: path, fill: "none", stroke: colour, "stroke-width": name === "recall" ? 2.2 : 1.4, "stroke-linejoin": "round" }));
    points.forEach((point, i) => point && svg.append(titled(element("svg:circle", { cx: point[0], cy: point[1], r: 6, fill: "transparent" }), `${name === "recall" ? "recall" : "top-1 hit"} ${percent(values[i])} around ${number(Math.round(((i + 0.5) / values.length) * data.tokens.length))}`)));
  }
  for (let i = 0; i <= 4; i++) {
    const x = area.left + ((area.right - area.left) * i) / 4;
    svg.append(element("svg:text", { x, y: area.bottom + 18, "text-anchor": i === 0 ? "start" : i === 4 ? "end" : "middle" }, number(Math.round((data.tokens.length * i) / 4))));
  }
  key(box, ["recall", "var(--accent)"], ["top-1 hit", "var(--third)"]);
}

function drawDistance(box, layer) {
  document.getElementById("distance-note").textContent = `Where layer ${layer.layer}'s selections lie, and where they would lie if all that is visible were equally likely.`;
  const svg = frame(box, 240, "Distances of selected places"), area = { left: 48, right: 516, top: 8, bottom: 200 };
  const share = (counts) => counts.map((count) => count / Math.max(1, counts.reduce((a, b) => a + b, 0)));
  const chosen = share(layer.distances).slice(0, data.bins.length), possible = share(layer.possible_distances).slice(0, data.bins.length);
  const top = Math.ceil(Math.max(...chosen, ...possible, 0.04) * 25) / 25;
  yAxis(svg, area, top, (value) => `${+(value * 100).toFixed(1)}%`);
  const slot = (area.right - area.left) / data.bins.length, high = (area.bottom - area.top) / top;
  let outline = "";
  data.bins.forEach((name, i) => {
    const x = area.left + slot * i;
    const bar = element("svg:rect", { x: x + slot * 0.12, y: area.bottom - chosen[i] * high, width: slot * 0.76, height: chosen[i] * high, rx: 2, fill: "var(--accent)" });
    svg.append(titled(bar, `distance ${name}: ${percent(chosen[i])} of the selected, ${percent(possible[i])} of the visible`));
    outline += `${i ? "L" : "M"}${x} ${area.bottom - possible[i] * high}L${x + slot} ${area.bottom - possible[i] * high}`;
    if (i % Math.ceil(data.bins.length / 9) === 0) svg.append(element("svg:text", { x: x + slot / 2, y: area.bottom + 18, "text-anchor": "middle" }, name.split(" to ")[0]));
  });
  svg.append(element("svg:path", { d: outline, fill: "none", stroke: "var(--second)", "stroke-width": 1.6 }));
  svg.append(element("svg:text", { x: (area.left + area.right) / 2, y: area.bottom + 36, "text-anchor": "middle" }, "tokens behind the query, from"));
  key(box, ["selected", "var(--accent)"], ["visible", "var(--second)"]);
}

function drawOverlap(box, overlap, show) {
  const count = overlap.layers.length;
  if (!overlap.queries) { box.replaceChildren(element("p", {}, "There is nothing to compare.")); return; }
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

start();
