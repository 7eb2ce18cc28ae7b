"use strict";

/* A layer's arrays, in the format of packing.py. */
class LayerArrays {
  static async unpack(about, kept) {
    const text = document.getElementById(`layer-${about.layer}`).textContent;
    const packed = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new LayerArrays(about, await new Response(stream).arrayBuffer(), kept);
  }

  constructor(about, buffer, kept) {
    let at = 0;
    const take = (Kind, count) => {
      const part = buffer.slice(at, at + count * Kind.BYTES_PER_ELEMENT);
      at += part.byteLength;
      return new Kind(part);
    };
    const area = about.grid * about.columns;
    this.about = about;
    this.maps = { share: take(Uint8Array, area), score: take(Uint8Array, area) };
    this.peaks = take(Float32Array, about.grid);
    this.maps.mass = take(Uint16Array, area);
    if (about.shares !== null) return;
    const counts = take(Uint16Array, kept);
    this.low = take(Float32Array, kept);
    this.high = take(Float32Array, kept);
    const gaps = take(Uint8Array, about.gapBytes);
    this.levels = take(Uint16Array, about.selectedCount);
    this.starts = new Uint32Array(kept + 1);
    for (let row = 0; row < kept; row++) this.starts[row + 1] = this.starts[row] + counts[row];
    this.candidates = new Uint32Array(about.selectedCount);
    for (let row = 0, read = 0; row < kept; row++) {
      let candidate = -1;
      for (let i = this.starts[row]; i < this.starts[row + 1]; i++) {
        let gap = 0, shift = 0, byte;
        do {
          byte = gaps[read++];
          gap |= (byte & 127) << shift;
          shift += 7;
        } while (byte > 127);
        candidate += gap + 1;
        this.candidates[i] = candidate;
      }
    }
  }

  /* The index of the first candidate >= `candidate` in a row. */
  seek(row, candidate) {
    let low = this.starts[row], high = this.starts[row + 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.candidates[middle] < candidate) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /* The strength, 0 to 1, with which a block of a map is drawn. */
  strength(mode, at) { return this.maps[mode][at] / (mode === "mass" ? 65535 : 255); }

  /* The blocks of the maps that hold a pair. */
  block(query, candidate, tokens) {
    const { grid, columns, candidates } = this.about;
    const row = Math.min(grid - 1, Math.floor((query * grid) / tokens));
    const column = Math.min(columns - 1, Math.floor((candidate * columns) / candidates));
    const first = (index, count, parts) => Math.ceil((index * count) / parts);
    return {
      row, at: row * columns + column,
      queries: [first(row, tokens, grid), first(row + 1, tokens, grid)],
      candidates: [first(column, candidates, columns), first(column + 1, candidates, columns)],
    };
  }

  score(row, i) {
    return this.low[row] + ((this.high[row] - this.low[row]) * this.levels[i]) / 65535;
  }
}

/* A canvas of queries (down) and tokens (across) that can be zoomed and moved. Both axes count tokens. */
class HeatMap {
  constructor(canvas, tokens, kept, needle) {
    Object.assign(this, { canvas, tokens, kept, needle, mode: "score", layer: null, rows: null, pinned: null });
    this.margin = { left: 68, top: 40, right: 6, bottom: 6 };
    this.view = { x: 0, y: 0, span: tokens };
    this.changed = () => {};
    this.drawing = 0;
    new ResizeObserver(() => this.redraw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
  }

  /* Show a layer's maps; `rows` is the layer that holds the selections, another one if they are shared. */
  show(layer, rows) {
    this.layer = layer;
    this.rows = rows;
    this.redraw();
  }

  redraw() {
    if (!this.drawing) this.drawing = requestAnimationFrame(() => { this.drawing = 0; this.draw(); });
  }

  /* The plot in CSS pixels. The shorter side shows `span` tokens. */
  get plot() {
    const { left, top, right, bottom } = this.margin;
    const width = Math.max(40, this.canvas.clientWidth - left - right);
    const height = Math.max(40, this.canvas.clientHeight - top - bottom);
    const scale = Math.min(width, height) / this.view.span;
    return { left, top, width, height, scale };
  }

  /* The position of a canvas pixel in tokens; null outside the plot. */
  locate(px, py) {
    const { left, top, width, height, scale } = this.plot;
    if (px < left || py < top || px >= left + width || py >= top + height) return null;
    const x = this.view.x + (px - left) / scale, y = this.view.y + (py - top) / scale;
    return x < this.tokens && y < this.tokens ? { x, y, size: 1 / scale } : null;
  }

  zoom(factor, px, py) {
    const before = this.plot;
    const at = { x: (px ?? before.left + before.width / 2) - before.left, y: (py ?? before.top + before.height / 2) - before.top };
    const fixed = { x: this.view.x + at.x / before.scale, y: this.view.y + at.y / before.scale };
    this.view.span = Math.min(this.tokens, Math.max(Math.min(8, this.tokens), this.view.span * factor));
    const scale = this.plot.scale;
    this.moveTo(fixed.x - at.x / scale, fixed.y - at.y / scale);
  }

  /* Move the corner of the view, but not beyond the prompt. */
  moveTo(x, y) {
    const { width, height, scale } = this.plot;
    this.view.x = Math.max(0, Math.min(x, this.tokens - width / scale));
    this.view.y = Math.max(0, Math.min(y, this.tokens - height / scale));
    this.redraw();
    this.changed();
  }

  move(dx, dy) {
    this.moveTo(this.view.x + dx / this.plot.scale, this.view.y + dy / this.plot.scale);
  }

  reset() {
    this.view.span = this.tokens;
    this.moveTo(0, 0);
  }

  centre(x, y) {
    const { width, height, scale } = this.plot;
    this.moveTo(x - width / scale / 2, y - height / scale / 2);
  }

  queryOf(row) { return this.kept ? this.kept[row] : row; }

  /* The first kept row whose query is >= `query`. */
  rowFrom(query) {
    if (!this.kept) return Math.max(0, Math.min(this.tokens, query));
    let low = 0, high = this.kept.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.kept[middle] < query) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  get rowCount() { return this.kept ? this.kept.length : this.tokens; }

  draw() {
    const canvas = this.canvas, ratio = devicePixelRatio || 1;
    canvas.width = Math.round(canvas.clientWidth * ratio);
    canvas.height = Math.round(canvas.clientHeight * ratio);
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    if (!this.layer) return;
    const plot = this.plot;
    const wide = Math.max(1, Math.round(Math.min(plot.width, this.tokens * plot.scale) * ratio));
    const high = Math.max(1, Math.round(Math.min(plot.height, this.tokens * plot.scale) * ratio));
    const image = context.createImageData(wide, high);
    this.paint(new Uint32Array(image.data.buffer), wide, high, plot.scale * ratio);
    context.putImageData(image, Math.round(plot.left * ratio), Math.round(plot.top * ratio));
    this.drawAxes(context, plot);
  }

  /* Fill pixels: visible pairs, then the map, then the kept queries. */
  paint(pixels, wide, high, scale) {
    const { about } = this.layer, colours = ramp(), { x, y } = this.view;
    const values = new Float32Array(wide * high).fill(-1);
    const first = this.rowFrom(Math.floor(y)), last = this.rowFrom(Math.ceil(y + high / scale));
    const rows = this.mode === "mass" ? null : this.rows;
    const selected = rows ? rows.starts[Math.min(last, this.rowCount)] - rows.starts[Math.min(first, this.rowCount)] : 0;
    const exact = rows && selected <= 3e6 && (!this.kept || scale >= 3);
    for (let py = 0; py < high; py++) {
      const query = y + (py + 0.5) / scale;
      const seen = Math.floor((Math.floor(query) + 1) / about.ratio) * about.ratio;
      const end = Math.min(wide, Math.ceil((seen - x) * scale));
      if (end > 0) values.fill(0, py * wide, py * wide + end);
      // Around kept queries the map stays in the background.
      if (!exact || this.kept) this.paintMap(values, py, query, end, wide, scale, exact ? 0.4 : 1);
    }
    if (exact) this.paintRows(values, rows, first, last, wide, high, scale);
    for (let i = 0; i < values.length; i++) {
      pixels[i] = values[i] < 0 ? 0 : colours[Math.min(255, Math.round(values[i] * 255))];
    }
  }

  paintMap(values, py, query, end, wide, scale, strength) {
    const { about } = this.layer;
    const row = Math.min(about.grid - 1, Math.floor((query / this.tokens) * about.grid)) * about.columns;
    const width = about.candidates * about.ratio;
    for (let px = 0; px < end; px++) {
      const column = Math.floor(((this.view.x + (px + 0.5) / scale) / width) * about.columns);
      if (column < about.columns) values[py * wide + px] = strength * this.layer.strength(this.mode, row + column);
    }
  }

  paintRows(values, rows, first, last, wide, high, scale) {
    const { ratio } = this.layer.about, { x, y } = this.view, share = this.mode === "share";
    // A pixel of several pairs shows the selected share, or the mean score of the selected pairs.
    const counts = scale < 1 ? new Uint16Array(values.length) : null, gap = scale >= 9 ? 1 : 0;
    for (let row = first; row < Math.min(last, this.rowCount); row++) {
      const query = this.queryOf(row);
      const top = Math.max(0, Math.floor((query - y) * scale));
      const bottom = Math.min(high, Math.max(top + 1, Math.floor((query + 1 - y) * scale) - gap));
      const stop = rows.starts[row + 1];
      if (this.kept) for (let py = top; py < bottom; py++) {
        const end = py * wide + Math.min(wide, Math.max(0, Math.ceil((query + 1 - x) * scale)));
        values.fill(0, py * wide, end);
      }
      for (let i = rows.seek(row, Math.floor(x / ratio)); i < stop; i++) {
        const from = (rows.candidates[i] * ratio - x) * scale;
        if (from >= wide) break;
        const left = Math.max(0, Math.floor(from));
        const right = Math.min(wide, Math.max(left + 1, Math.floor(from + ratio * scale) - gap));
        // The lowest selected score still has a visible colour.
        const value = share ? 1 : 0.25 + (0.75 * rows.levels[i]) / 65535;
        for (let py = top; py < bottom; py++) for (let px = left; px < right; px++) {
          const at = py * wide + px;
          if (counts) {
            values[at] = counts[at]++ ? values[at] + value : value;
          } else values[at] = value;
        }
      }
    }
    if (!counts) return;
    const whole = 1 / (scale * Math.min(1, scale * ratio));
    for (let i = 0; i < values.length; i++) {
      if (counts[i]) values[i] = share ? Math.sqrt(Math.min(1, counts[i] / whole)) : values[i] / counts[i];
    }
  }

  drawAxes(context, plot) {
    const style = getComputedStyle(document.documentElement);
    const soft = style.getPropertyValue("--soft"), line = style.getPropertyValue("--line");
    const { x, y } = this.view, across = Math.min(plot.width, this.tokens * plot.scale), down = Math.min(plot.height, this.tokens * plot.scale);
    context.font = "12px system-ui, 'Liberation Sans', sans-serif";
    context.fillStyle = soft;
    context.strokeStyle = line;
    context.lineWidth = 1;
    const step = niceStep(56 / plot.scale);
    context.textAlign = "center";
    for (let tick = Math.ceil(x / step) * step; tick < x + across / plot.scale; tick += step) {
      const px = Math.round(plot.left + (tick - x) * plot.scale) + 0.5;
      context.beginPath(); context.moveTo(px, plot.top - 5); context.lineTo(px, plot.top); context.stroke();
      if (px < plot.left + across - 8) context.fillText(tick.toLocaleString("en"), Math.max(px, plot.left + 4), plot.top - 9);
    }
    context.textAlign = "right";
    for (let tick = Math.ceil(y / step) * step; tick < y + down / plot.scale; tick += step) {
      const py = Math.round(plot.top + (tick - y) * plot.scale) + 0.5;
      context.beginPath(); context.moveTo(plot.left - 5, py); context.lineTo(plot.left, py); context.stroke();
      if (py < plot.top + down - 2) context.fillText(tick.toLocaleString("en"), plot.left - 9, py + (tick ? 4 : 9));
    }
    context.textAlign = "left";
    context.fillText(this.layer.about.ratio > 1 ? "position of the entry (tokens) →" : "position of the token →", plot.left, 12);
    context.save();
    context.translate(12, plot.top + down);
    context.rotate(-Math.PI / 2);
    context.fillText("← position of the query (tokens)", 0, 0);
    context.restore();
    this.drawNeedle(context, plot, across, down, style);
    if (this.pinned !== null && this.pinned >= y && this.pinned < y + down / plot.scale) {
      const py = plot.top + (this.pinned - y) * plot.scale;
      context.strokeStyle = style.getPropertyValue("--second");
      context.strokeRect(plot.left - 0.5, Math.floor(py) - 0.5, across + 1, Math.max(2, Math.ceil(plot.scale)) + 1);
    }
  }

  /* A frame around the column that holds the needle, from the first query that can see it. */
  drawNeedle(context, plot, across, down, style) {
    const { ratio, candidates } = this.layer.about, { x, y } = this.view;
    const candidate = this.needle === null ? -1 : Math.floor(this.needle / ratio);
    if (candidate < 0 || candidate >= candidates) return;
    const left = plot.left + (candidate * ratio - x) * plot.scale, right = left + ratio * plot.scale;
    const top = plot.top + Math.max(0, (candidate * ratio + ratio - 1 - y) * plot.scale);
    if (right <= plot.left || left >= plot.left + across || top >= plot.top + down) return;
    context.strokeStyle = context.fillStyle = style.getPropertyValue("--second");
    context.setLineDash([5, 3]);
    context.strokeRect(Math.floor(left) - 1.5, Math.floor(top) - 0.5, Math.max(2, Math.ceil(right - left)) + 3, plot.top + down - top);
    context.setLineDash([]);
    // Beside the column's upper end, where the map is empty because the needle is still in the future.
    context.textAlign = "left";
    context.fillText("needle", Math.min(right + 6, plot.left + across - 40), Math.max(plot.top + 12, top - 4));
  }
}

function niceStep(least) {
  const base = 2 ** Math.ceil(Math.log2(Math.max(1, least)));
  return Math.max(1, base);
}

const STOPS = {
  light: ["#e9eeec", "#b5d8d3", "#5fb0b5", "#1c7f93", "#17506f", "#221f45"],
  dark: ["#1d2829", "#1c4650", "#1f7480", "#39a79c", "#9bd5a0", "#f4f3c1"],
};

/* 256 colours from nothing to most, as canvas pixels. */
function ramp() {
  const stops = STOPS[matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"];
  const rgb = stops.map((text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16)));
  const colours = new Uint32Array(256);
  for (let i = 0; i < 256; i++) {
    const at = (i / 255) * (rgb.length - 1), low = Math.min(rgb.length - 2, Math.floor(at));
    const [r, g, b] = [0, 1, 2].map((c) => Math.round(rgb[low][c] + (rgb[low + 1][c] - rgb[low][c]) * (at - low)));
    colours[i] = (255 << 24) | (b << 16) | (g << 8) | r;
  }
  return colours;
}
