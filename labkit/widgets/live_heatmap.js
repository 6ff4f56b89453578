// The canvas: layers x experts, the decayed history as heat, the current token on top of it.

function rgb(context, colour) {
  context.fillStyle = colour; // the canvas parses any CSS colour and gives back #rrggbb
  const hex = context.fillStyle;
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

class Heatmap {
  constructor(canvas, store, layerNames) {
    this.canvas = canvas;
    this.store = store;
    this.layerNames = layerNames;
    this.context = canvas.getContext("2d");
    this.small = document.createElement("canvas"); // one pixel per cell, scaled up without blur
    this.geometry = null;
    this.drawn = 0;
  }

  // Lay the cells out for the width the page gives; height follows from the number of layers.
  layout(width) {
    const { rows, experts } = this.store;
    const left = 62;
    const bottom = 42;
    const top = 6;
    const cellWidth = Math.max(1, (width - left - 8) / Math.max(1, experts));
    const cellHeight = Math.max(4, Math.min(26, Math.max(cellWidth, 168 / Math.max(1, rows))));
    const height = top + cellHeight * rows + bottom;
    const ratio = window.devicePixelRatio || 1;
    const pixels = [Math.round(width * ratio), Math.round(height * ratio)];
    if (this.canvas.width !== pixels[0] || this.canvas.height !== pixels[1]) {
      [this.canvas.width, this.canvas.height] = pixels;
      this.canvas.style.height = `${height}px`;
    }
    const before = this.geometry;
    this.geometry = { left, top, cellWidth, cellHeight, height, width, ratio };
    if (before?.width !== width || before?.height !== height || before?.ratio !== ratio) {
      Object.assign(this.canvas.dataset, this.geometry); // for tests, which look at the pixels
    }
  }

  // The cell under a point of the canvas in CSS pixels: {row, expert}, or null outside.
  cellAt(x, y) {
    const g = this.geometry;
    if (!g) return null;
    const expert = Math.floor((x - g.left) / g.cellWidth);
    const row = Math.floor((y - g.top) / g.cellHeight);
    const inside = expert >= 0 && expert < this.store.experts && row >= 0 && row < this.store.rows;
    return inside ? { row, expert } : null;
  }

  // The rectangle of a cell in CSS pixels of the canvas.
  rectangle(row, expert) {
    const g = this.geometry;
    return [g.left + expert * g.cellWidth, g.top + row * g.cellHeight, g.cellWidth, g.cellHeight];
  }

  draw(width, cursor, selected, focused) {
    const { store, context } = this;
    if (!store.rows) return;
    this.layout(width);
    const style = getComputedStyle(this.canvas);
    const colour = (name) => style.getPropertyValue(name).trim();
    const g = this.geometry;
    context.setTransform(g.ratio, 0, 0, g.ratio, 0, 0);
    context.clearRect(0, 0, g.width, g.height);
    this.drawHeat(store.heat(cursor), colour);
    this.drawGrid(colour("--lk-panel"));
    const token = store.tokens[cursor];
    if (token) this.drawToken(token, colour);
    this.drawAxes(colour);
    if (focused) this.outline(focused, colour("--lk-faint"), 1.5);
    if (selected) this.outline(selected, colour("--lk-select"), 3);
    this.drawn += 1;
  }

  drawHeat(heat, colour) {
    const { rows, experts } = this.store;
    const { context, small } = this;
    if (small.width !== experts || small.height !== rows) {
      small.width = experts;
      small.height = rows;
    }
    const cold = rgb(context, colour("--lk-cold"));
    const hot = rgb(context, colour("--lk-hot"));
    const pen = small.getContext("2d");
    const image = pen.createImageData(experts, rows);
    for (let i = 0; i < heat.length; i++) {
      const level = Math.min(1, heat[i] ** 0.7);
      for (let c = 0; c < 3; c++) image.data[4 * i + c] = cold[c] + (hot[c] - cold[c]) * level;
      image.data[4 * i + 3] = 255;
    }
    pen.putImageData(image, 0, 0);
    const g = this.geometry;
    context.imageSmoothingEnabled = false;
    context.drawImage(small, g.left, g.top, g.cellWidth * experts, g.cellHeight * rows);
  }

  drawGrid(colour) {
    const { rows, experts } = this.store;
    const { context, geometry: g } = this;
    context.fillStyle = colour;
    const gap = g.cellWidth >= 12 ? 2 : 1;
    if (g.cellWidth >= 5) {
      for (let e = 1; e < experts; e++) {
        context.fillRect(g.left + e * g.cellWidth - gap / 2, g.top, gap, g.cellHeight * rows);
      }
    }
    if (g.cellHeight >= 4) {
      for (let r = 1; r < rows; r++) {
        context.fillRect(g.left, g.top + r * g.cellHeight - gap / 2, g.cellWidth * experts, gap);
      }
    }
  }

  drawToken(token, colour) {
    const { context, store, geometry: g } = this;
    const inset = g.cellWidth >= 12 ? 1 : 0;
    const [hit, miss, panel] = ["--lk-hit", "--lk-miss", "--lk-panel"].map(colour);
    for (let c = 0; c < token.ids.length; c++) {
      if (token.ids[c] === NOT_ROUTED) continue;
      const [x, y, w, h] = this.rectangle(Math.floor(c / store.slots), token.ids[c]);
      const box = [x + inset, y + inset, Math.max(2, w - 2 * inset), Math.max(2, h - 2 * inset)];
      context.fillStyle = panel; // the history must not shine through
      context.fillRect(...box);
      context.fillStyle = token.hits[c] ? hit : miss;
      context.globalAlpha = 0.7 + (0.3 * token.weights[c]) / 255;
      context.fillRect(...box);
      context.globalAlpha = 1;
      if (!token.hits[c] && w >= 8 && h >= 8) {
        // a hole tells a miss from a hit without the colour
        const hole = Math.min(w, h) * 0.3;
        context.fillStyle = panel;
        context.fillRect(x + (w - hole) / 2, y + (h - hole) / 2, hole, hole);
      }
    }
  }

  drawAxes(colour) {
    const { context, store, geometry: g } = this;
    context.fillStyle = colour("--lk-faint");
    context.font = `12px ${getComputedStyle(this.canvas).fontFamily}`;
    context.textBaseline = "middle";
    context.textAlign = "right";
    const rowStep = Math.ceil(13 / g.cellHeight);
    for (let r = 0; r < store.rows; r += rowStep) {
      const label = rowStep === 1 && g.cellHeight >= 15 ? `layer ${this.layerNames[r]}` : this.layerNames[r];
      context.fillText(label, g.left - 8, g.top + (r + 0.5) * g.cellHeight);
    }
    context.textAlign = "center";
    context.textBaseline = "top";
    const below = g.top + store.rows * g.cellHeight + 6;
    const steps = [1, 2, 4, 8, 16, 32, 64, 128];
    const step = steps.find((s) => s * g.cellWidth >= 24) || 256;
    for (let e = 0; e < store.experts; e += step) {
      context.fillText(String(e), g.left + (e + 0.5) * g.cellWidth, below);
    }
    const middle = g.left + (store.experts * g.cellWidth) / 2;
    context.fillText("expert", middle, below + 17);
  }

  outline(cell, colour, width) {
    const [x, y, w, h] = this.rectangle(cell.row, cell.expert);
    this.context.strokeStyle = colour;
    this.context.lineWidth = width;
    this.context.strokeRect(x - 1, y - 1, Math.max(3, w) + 2, h + 2);
  }
}
