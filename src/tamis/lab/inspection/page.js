const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);

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
    drawPosition($("chart-position"), now, data.tokens.length);
    drawDistance($("chart-distance"), now, data.bins);
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
  const candidateText = (candidate) => data.tokens.slice(candidate * now.ratio, (candidate + 1) * now.ratio).join(" ");
  const candidateName = (candidate) =>
    now.ratio === 1 ? number(candidate) : `${number(candidate * now.ratio)}–${number(candidate * now.ratio + now.ratio - 1)}`;

  const row = (name, ...value) => [element("dt", {}, name), element("dd", {}, ...value)];
  const token = (text) => element("span", { class: "token" }, text);

  /* What lies under a pixel: one pair if it is large enough, else what is selected of all pairs there. */
  function under(spot) {
    const rows = heat.rows, query = Math.floor(spot.y), candidate = Math.floor(spot.x / now.ratio);
    if (spot.x >= Math.floor((query + 1) / now.ratio) * now.ratio && spot.size < 1) {
      return [...row("query", token(shown(query)), ` at ${number(query)}`), ...row("", "cannot see this")];
    }
    const queries = [query, query + Math.max(1, Math.round(spot.size))];
    const candidates = [candidate, candidate + Math.max(1, Math.round(spot.size / now.ratio))];
    let count = 0, best = -1, bestRow = -1, known = 0;
    for (let r = heat.rowFrom(queries[0]); r < Math.min(heat.rowFrom(queries[1]), heat.rowCount); r++) {
      known++;
      for (let i = rows.seek(r, candidates[0]); i < rows.starts[r + 1] && rows.candidates[i] < candidates[1]; i++) {
        count++;
        if (best < 0 || rows.score(r, i) > rows.score(bestRow, best)) [best, bestRow] = [i, r];
      }
    }
    if (!known) return block(query, candidate);
    const single = queries[1] - queries[0] === 1 && candidates[1] - candidates[0] === 1;
    if (best >= 0) {
      const at = heat.queryOf(bestRow), where = rows.candidates[best];
      const found = [...row("query", token(shown(at)), ` at ${number(at)}`)];
      found.push(...row(now.ratio === 1 ? "token" : "entry", token(candidateText(where)), ` at ${candidateName(where)}`));
      found.push(...row("score", scored(rows.score(bestRow, best)), `, rank ${rank(bestRow, best)} of ${number(rows.starts[bestRow + 1] - rows.starts[bestRow])}`));
      found.push(...row("distance", number(at - (where * now.ratio + now.ratio - 1))));
      if (!single && count > 1) found.push(...row("", `best of ${number(count)} selected here`));
      return found;
    }
    const r = heat.rowFrom(query);
    if (!single) {
      return [
        ...row("queries", token(shown(query)), ` at ${number(query)} to ${number(queries[1] - 1)}`),
        ...row(now.ratio === 1 ? "tokens" : "entries", token(candidateText(candidate)), ` at ${number(candidate * now.ratio)} to ${number(candidates[1] * now.ratio - 1)}`),
        ...row("score", "nothing selected here"),
      ];
    }
    return [
      ...row("query", token(shown(query)), ` at ${number(query)}`),
      ...row(now.ratio === 1 ? "token" : "entry", token(candidateText(candidate)), ` at ${candidateName(candidate)}`),
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
  function block(query, candidate) {
    const { about, maps } = heat.layer;
    const r = Math.floor((query / heat.tokens) * about.grid), c = Math.floor((candidate / about.candidates) * about.columns);
    const at = r * about.columns + c, level = maps.score[at];
    const from = Math.ceil((r * heat.tokens) / about.grid), to = Math.ceil(((r + 1) * heat.tokens) / about.grid) - 1;
    const found = [...row("queries", `${number(from)}–${number(to)}`), ...row("around", token(candidateText(candidate)), ` at ${candidateName(candidate)}`)];
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
      const where = element("span", { class: "where" }, ` ${candidateName(rows.candidates[i])}`);
      list.append(element("li", {}, element("span", {}, token(candidateText(rows.candidates[i])), where), element("span", {}, scored(rows.score(r, i)))));
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

start();
