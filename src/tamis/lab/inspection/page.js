const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);

function start() {
  const keptCount = data.kept ? data.kept.length : data.tokens.length;
  const heat = new HeatMap($("heat"), data.tokens.length, data.kept, data.needle);
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
    drawForLayer();
    listPinned();
    document.body.dataset.shown = layer;
  }

  function drawForLayer() {
    drawPosition($("chart-position"), now, data.tokens.length);
    drawDistance($("chart-distance"), now, data.bins);
  }

  function drawForAll() {
    drawLayers($("chart-layers"), data.layers, show);
    drawParts($("chart-parts"), data.layers, show);
    drawOverlap($("chart-overlap"), data.overlap);
  }

  function drawScale() {
    const names = { score: "Score", share: "Share selected", mass: "Dense attention's weight" };
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
    const canvas = $("mini"), { about } = heat.layer, size = 256;
    canvas.width = canvas.height = size;
    const context = canvas.getContext("2d"), image = context.createImageData(size, size);
    const pixels = new Uint32Array(image.data.buffer), colours = ramp();
    for (let y = 0; y < size; y++) {
      const row = Math.floor((y / size) * about.grid) * about.columns;
      for (let x = 0; x <= y; x++) pixels[y * size + x] = colours[Math.round(255 * heat.layer.strength(heat.mode, row + Math.floor((x / size) * about.columns)))];
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

  const span = ([from, to], unit = 1) => (to - from === 1 && unit === 1 ? number(from) : `${number(from * unit)}–${number(to * unit - 1)}`);
  const unitName = (count) => (now.ratio === 1 ? (count === 1 ? "token" : "tokens") : count === 1 ? "entry" : "entries");
  const marked = (candidate) => (data.needle !== null && Math.floor(data.needle / now.ratio) === candidate ? " (needle)" : "");

  /* The query and the candidate under the pointer, or the ranges of them. */
  function pair(queries, candidates) {
    const several = queries[1] - queries[0] > 1 || candidates[1] - candidates[0] > 1;
    const names = several ? ["queries", unitName(2)] : ["query", unitName(1)];
    return [
      ...row(names[0], token(shown(queries[0])), ` at ${span(queries)}`),
      ...row(names[1], token(candidateText(candidates[0])), ` at ${span(candidates, now.ratio)}${marked(candidates[0])}`),
    ];
  }

  /* What lies under a pixel, in the quantity of the view: one pair if it is large enough, else all pairs there. */
  function under(spot) {
    const query = Math.floor(spot.y), candidate = Math.floor(spot.x / now.ratio);
    if (spot.x >= Math.floor((query + 1) / now.ratio) * now.ratio && spot.size < 1) {
      return [...row("query", token(shown(query)), ` at ${number(query)}`), ...row("", "cannot see this")];
    }
    if (heat.mode === "mass") return weight(query, candidate);
    const queries = [query, Math.min(heat.tokens, query + Math.max(1, Math.round(spot.size)))];
    const candidates = [candidate, Math.min(now.candidates, candidate + Math.max(1, Math.round(spot.size / now.ratio)))];
    const found = selectedIn(queries, candidates);
    if (!found.pairs) return block(query, candidate);
    const single = queries[1] - queries[0] === 1 && candidates[1] - candidates[0] === 1;
    if (heat.mode === "share") return density(queries, candidates, found, single);
    return score(queries, candidates, found, single);
  }

  /* The selected pairs among those whose selections are in this file; `pairs` counts all that are visible. */
  function selectedIn(queries, candidates) {
    const rows = heat.rows, found = { pairs: 0, count: 0, best: -1, row: -1 };
    for (let r = heat.rowFrom(queries[0]); r < heat.rowCount && heat.queryOf(r) < queries[1]; r++) {
      const visible = Math.floor((heat.queryOf(r) + 1) / now.ratio);
      found.pairs += Math.max(0, Math.min(candidates[1], visible) - candidates[0]);
      for (let i = rows.seek(r, candidates[0]); i < rows.starts[r + 1] && rows.candidates[i] < candidates[1]; i++) {
        found.count++;
        if (found.best < 0 || rows.score(r, i) > rows.score(found.row, found.best)) [found.best, found.row] = [i, r];
      }
    }
    return found;
  }

  function score(queries, candidates, found, single) {
    const rows = heat.rows;
    if (found.best < 0) {
      const why = single ? `below the cutoff at ${scored(rows.low[heat.rowFrom(queries[0])])}: not selected` : "nothing selected here";
      return [...pair(queries, candidates), ...row("score", why)];
    }
    const at = heat.queryOf(found.row), where = rows.candidates[found.best];
    const told = pair([at, at + 1], [where, where + 1]);
    told.push(...row("score", scored(rows.score(found.row, found.best)), `, rank ${rank(found.row, found.best)} of ${number(rows.starts[found.row + 1] - rows.starts[found.row])}`));
    told.push(...row("distance", `${number(at - (where * now.ratio + now.ratio - 1))} tokens`));
    if (!single && found.count > 1) told.push(...row("", `best of ${number(found.count)} selected here`));
    return told;
  }

  function density(queries, candidates, found, single) {
    const share = `${number(found.count)} of ${number(found.pairs)} pairs (${percent(found.count / found.pairs)})`;
    return [...pair(queries, candidates), ...row("selected", single ? (found.count ? "yes" : "no") : share)];
  }

  /* Dense attention's weight in the block of its map; a block is one pair where the prompt is short. */
  function weight(query, candidate) {
    const { row: r, at, queries, candidates } = heat.layer.block(query, candidate, heat.tokens);
    const peak = heat.layer.peaks[r], told = pair(queries, candidates);
    if (Number.isNaN(peak)) return [...told, ...row("dense weight", "not computed for this query")];
    const value = heat.layer.strength("mass", at) ** 2 * peak, one = candidates[1] - candidates[0] === 1;
    told.push(...row("dense weight", value >= 1e-3 || !value ? `${(100 * value).toFixed(2)}%` : `${(100 * value).toExponential(1)}%`, one ? "" : ", sum over these"));
    const found = selectedIn(queries, candidates);
    if (found.pairs) told.push(...row("selected", found.pairs === 1 ? (found.count ? "yes" : "no") : `${number(found.count)} of ${number(found.pairs)} pairs`));
    return told;
  }

  function rank(r, at) {
    const rows = heat.rows;
    let better = 1;
    for (let i = rows.starts[r]; i < rows.starts[r + 1]; i++) if (rows.levels[i] > rows.levels[at]) better++;
    return number(better);
  }

  /* Queries whose selections are not in this file one by one. */
  function block(query, candidate) {
    const { about, maps } = heat.layer, { at, queries, candidates } = heat.layer.block(query, candidate, heat.tokens);
    const level = maps.score[at], told = pair(queries, candidates);
    told.push(...row("selected", level ? `${percent((maps.share[at] / 255) ** 2)} of the pairs here` : "nothing"));
    if (level && heat.mode === "score") told.push(...row("score", `at most ${scored(about.bestLow + ((about.bestHigh - about.bestLow) * (level - 1)) / 254)}`));
    return told;
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
      const where = element("span", { class: "where" }, ` ${candidateName(rows.candidates[i])}${marked(rows.candidates[i])}`);
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
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawScale(); drawMini(); drawOverlap($("chart-overlap"), data.overlap); });
  let wide = 0;
  new ResizeObserver(([{ contentRect }]) => {
    // Drawing a chart may change its height, which must not draw it again.
    if (Math.round(contentRect.width) === wide) return;
    wide = Math.round(contentRect.width);
    drawForAll();
    if (now) drawForLayer();
  }).observe(document.querySelector(".charts"));

  drawForAll();
  if (data.layers.length) show(data.layers[0].layer).then(() => pin(data.tokens.length - 1));
}

start();
