// What the view knows of a run: the frames that Python sent, decoded, one record per token.
// The wire format is written in frames.py; both sides name its fields in the same order.

const FRAME_VERSION = 1;
const HEADER_BYTES = 32;
const NOT_ROUTED = 0xffff; // this layer chose no expert for this token
const DECAY = 0.9; // of the heat that a choice leaves behind, from one token to the next
const MEMORY_TOKENS = 60; // 0.9 ** 60 is below 0.2 %: older choices cannot be seen

class RunStore {
  constructor() {
    this.run = -1;
    this.listeners = new Set();
    this.clear();
  }

  clear() {
    this.tokens = [];
    this.rows = 0; // MoE layers
    this.slots = 0; // experts per token and layer
    this.experts = 0; // experts per layer
    this.totals = { tokensPerSecond: NaN, hitRate: NaN, readMib: NaN };
    this.frames = 0;
  }

  // `view` is the DataView of one whole frame. Frames may repeat (a view that asks for the history)
  // and come in any order: a token is stored under its own index.
  read(view) {
    if (!view || view.byteLength < HEADER_BYTES || view.getUint16(0, true) !== FRAME_VERSION) return;
    const rows = view.getUint16(2, true);
    const slots = view.getUint16(4, true);
    const run = view.getUint32(8, true);
    if (run < this.run) return; // a late frame of a run that is over
    if (run > this.run) {
      this.clear();
      this.run = run;
    }
    this.rows = rows;
    this.slots = slots;
    this.experts = view.getUint16(6, true);
    const first = view.getUint32(12, true);
    const count = view.getUint16(16, true);
    this.totals = {
      tokensPerSecond: view.getFloat32(20, true),
      hitRate: view.getFloat32(24, true),
      readMib: view.getFloat32(28, true),
    };
    this.readTokens(view, first, count);
    this.frames += 1;
    for (const listener of this.listeners) listener();
  }

  readTokens(view, first, count) {
    const cells = this.rows * this.slots;
    const bytes = new Uint8Array(view.buffer, view.byteOffset, view.byteLength);
    let at = HEADER_BYTES;
    const take = (length) => bytes.slice(at, (at += length)); // a copy: aligned, and ours to keep
    const ids = new Uint16Array(take(2 * count * cells).buffer);
    const weights = take(count * cells);
    const hits = take(Math.ceil((count * cells) / 8));
    const entropy = new Float32Array(take(4 * count).buffer);
    const milliseconds = new Float32Array(take(4 * count).buffer);
    const misses = new Uint16Array(take(2 * count).buffer);
    const lengths = new Uint16Array(take(2 * count).buffer);
    const phases = take(count);
    const decoder = new TextDecoder();
    for (let i = 0; i < count; i++) {
      const token = {
        index: first + i,
        ids: ids.subarray(i * cells, (i + 1) * cells),
        weights: weights.subarray(i * cells, (i + 1) * cells),
        entropy: entropy[i],
        misses: misses[i],
        milliseconds: milliseconds[i],
        prompt: phases[i] === 0,
        text: decoder.decode(take(lengths[i])),
      };
      token.hits = new Uint8Array(cells);
      for (let c = 0, bit = i * cells; c < cells; c++, bit++) {
        token.hits[c] = (hits[bit >> 3] >> (bit & 7)) & 1;
      }
      this.tokens[token.index] = token;
    }
  }

  // Low and high end of a colour scale for one value of the tokens: all but the outermost 4 %, in
  // whole steps, so that a single odd token does not wash out the rest and colours rarely change.
  range(name, step) {
    const values = this.tokens.map((token) => token[name]).filter(Number.isFinite);
    if (!values.length) return null;
    values.sort((a, b) => a - b);
    const at = (share) => values[Math.round(share * (values.length - 1))];
    const low = Math.floor(at(0.04) / step + 1e-6) * step;
    const high = Math.ceil(at(0.96) / step - 1e-6) * step;
    return [low, Math.max(high, low + step)];
  }

  // Heat of every (layer, expert) up to and with token `end`: 1 where every recent token chose it.
  heat(end) {
    const heat = new Float32Array(this.rows * this.experts);
    let sum = 0;
    for (let age = 0; age < MEMORY_TOKENS; age++) sum += DECAY ** age;
    for (let t = Math.max(0, end - MEMORY_TOKENS + 1); t <= end; t++) {
      const token = this.tokens[t];
      if (!token) continue;
      const share = DECAY ** (end - t) / sum;
      for (let c = 0; c < token.ids.length; c++) {
        const id = token.ids[c];
        if (id !== NOT_ROUTED) heat[Math.floor(c / this.slots) * this.experts + id] += share;
      }
    }
    return heat;
  }

  chose(token, row, expert) {
    const from = row * this.slots;
    for (let c = from; c < from + this.slots; c++) if (token.ids[c] === expert) return true;
    return false;
  }

  routed(token, row) {
    return token.ids[row * this.slots] !== NOT_ROUTED;
  }

  // All tokens that chose `expert` in layer row `row`, and how many the layer routed at all.
  choosers(row, expert) {
    const chosen = [];
    let routed = 0;
    for (const token of this.tokens) {
      if (!token || !this.routed(token, row)) continue;
      routed += 1;
      if (this.chose(token, row, expert)) chosen.push(token);
    }
    return { chosen, routed };
  }
}
