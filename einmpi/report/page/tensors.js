// Which rank holds which part of a tensor. Pictures are drawn when they come into view.

const CARDS_AT_A_TIME = 48;
const MAX_PANELS = 12;
const MAX_FINE_RUNS = 8;
const MAX_STRIPES = 8;
const MAX_WIDTH = 240; // pixels
const MAX_HEIGHT = 190;
const PANEL_GAP = 6;
const EVERYWHERE = -1; // a mesh axis along which every rank holds the same block
const PARTIAL = -2; // a mesh axis along which each rank holds a partial result

const mesh = data.layouts.mesh;
const strides = mesh.map((_, axis) => mesh.slice(axis + 1).reduce((a, b) => a * b, 1));
const ranksInMesh = mesh.reduce((a, b) => a * b, 1);

// The index ranges that a dimension is cut into: [start, stop, part], where `part` is what the
// dimension contributes to the number of the ranks that hold the range.
function segments(extent, dimension, cuts, windows = data.layouts.windows[extent]) {
  const axes = mesh.map((_, axis) => axis).filter((axis) => cuts[axis] === dimension);
  if (!axes.length) return [[0, extent, 0]];
  // An axis slices a digit of ⌊index · blocks / extent⌋, the number of a block: with all axes of its
  // window up to itself, it cuts the dimension into so many blocks.
  const blocksOf = new Map();
  for (const axis of axes) {
    const windowAxes = windows.find((group) => group.includes(axis));
    const before = windowAxes.slice(0, windowAxes.indexOf(axis) + 1);
    blocksOf.set(axis, before.reduce((count, other) => count * mesh[other], 1));
  }
  const blocks = Math.max(...blocksOf.values());
  const found = [];
  for (let block = 0; block < blocks; block += 1) {
    const start = Math.ceil(block * extent / blocks);
    const stop = Math.ceil((block + 1) * extent / blocks);
    let part = 0;
    for (const axis of axes) {
      part += Math.floor(start * blocksOf.get(axis) / extent) % mesh[axis] * strides[axis];
    }
    const last = found[found.length - 1];
    if (last && last[2] === part) last[1] = stop;
    else found.push([start, stop, part]);
  }
  return found;
}

// What to add to the number of one rank to get those that differ from it only along the axes of
// this kind, EVERYWHERE or PARTIAL.
function offsetsAlong(kind, cuts) {
  let found = [0];
  mesh.forEach((factor, axis) => {
    if (cuts[axis] !== kind) return;
    const digits = [...Array(factor).keys()];
    found = found.flatMap((base) => digits.map((digit) => base + digit * strides[axis]));
  });
  return found;
}

// The same for all ranks that hold a block or partial results of it.
function holderOffsets(cuts) {
  const copies = offsetsAlong(EVERYWHERE, cuts);
  const partials = offsetsAlong(PARTIAL, cuts);
  const found = copies.flatMap((copy) => partials.map((partial) => copy + partial));
  return found.sort((a, b) => a - b);
}

// All blocks of a tensor in a layout: [ranks, [start, stop] of each dimension].
function blocksOf(tensor, layout) {
  const [, , bound, , layouts, windows] = data.layouts.tensors[tensor];
  const cuts = layouts[layout].slice(1);
  const offsets = holderOffsets(cuts);
  let found = [[0, []]];
  bound.forEach((extent, dimension) => {
    const own = data.layouts.windows[windows[dimension]];
    const runs = segments(extent, dimension, cuts, own);
    found = found.flatMap(([base, ranges]) =>
      runs.map(([start, stop, part]) => [base + part, [...ranges, [start, stop]]]));
  });
  return found.map(([base, ranges]) => [offsets.map((offset) => base + offset), ranges]);
}

// Neighbouring numbers get hues far apart, and different lightness.
function rankColour(rank) {
  const hue = rank * 137.508 % 360;
  const saturation = (isDark() ? 45 : 58) + rank % 3 * 8;
  const lightness = (isDark() ? 28 : 76) + (rank % 4 - 1.5) * 5;
  return `hsl(${hue.toFixed(1)} ${saturation}% ${lightness}%)`;
}

// The numbers of ranks in at most so many characters; empty if there is no room.
function ranksText(ranks, partial, most) {
  const separator = partial ? "+" : " ";
  const all = ranks.join(separator);
  if (all.length <= most) return all;
  if (ranks.length === 1) return "";
  const ends = [ranks[0], "…", ranks[ranks.length - 1]].join(separator);
  if (ends.length <= most) return ends;
  return most > 2 ? "×" + ranks.length : "";
}

// Index ranges as they are drawn: {low, high, part, text}. Many short ranges of the same ranks are
// drawn as one, because they would be too small to see.
function drawnRuns(runs) {
  const byPart = new Map();
  for (const [start, stop, part] of runs) {
    if (!byPart.has(part)) byPart.set(part, []);
    byPart.get(part).push([start, stop]);
  }
  if (runs.length <= MAX_FINE_RUNS || byPart.size === runs.length) {
    return runs.map(([start, stop, part]) =>
      ({ low: start, high: stop, part, text: `${start}:${stop}` }));
  }
  let low = 0;
  return [...byPart].map(([part, ranges]) => {
    const high = ranges.reduce((sum, [start, stop]) => sum + stop - start, low);
    let text = ranges.slice(0, 4).map(([start, stop]) => `${start}:${stop}`).join(" ");
    if (ranges.length > 4) text += ` … (${ranges.length} ranges)`;
    const drawn = { low, high, part, text };
    low = high;
    return drawn;
  });
}

// ---- one picture --------------------------------------------------------------------------------

// What to draw where: two dimensions become rows and columns, further cut ones several panels.
function pictureOf(tensor, layout) {
  const [, , bound, , layouts, windows] = data.layouts.tensors[tensor];
  const cuts = layouts[layout].slice(1);
  const runs = bound.map((extent, dimension) => {
    const own = data.layouts.windows[windows[dimension]];
    return drawnRuns(segments(extent, dimension, cuts, own));
  });
  const parts = runs.map((each) => new Set(each.map((run) => run.part)).size);
  const mostCut = [...bound.keys()].sort((a, b) =>
    parts[b] - parts[a] || bound[b] - bound[a] || a - b);
  const chosen = mostCut.slice(0, 2).sort((a, b) => a - b);
  const [rows, columns] = [-1, -1, ...chosen].slice(-2); // -1: there is no such dimension
  let panels = [[0, []]];
  bound.forEach((_, dimension) => {
    if (dimension === rows || dimension === columns || parts[dimension] === 1) return;
    panels = panels.flatMap(([base, at]) =>
      runs[dimension].map((run) => [base + run.part, [...at, [dimension, run]]]));
  });
  const whole = [{ low: 0, high: 1, part: 0, text: "" }];
  const high = rows < 0 ? 1 : Math.max(1, bound[rows]);
  const wide = columns < 0 ? 1 : Math.max(1, bound[columns]);
  let width = clamp(MAX_HEIGHT * wide / high, 130, MAX_WIDTH);
  let height = clamp(MAX_WIDTH * high / wide, 80, MAX_HEIGHT);
  if (rows < 0) {
    width = columns < 0 ? 60 : MAX_WIDTH;
    height = 34;
  }
  let inRow = 1;
  let scale = 1;
  if (panels.length > 1) {
    inRow = width > 130 ? 2 : 3;
    scale = (MAX_WIDTH - PANEL_GAP * (inRow - 1)) / inRow / width;
  }
  const panelWidth = width * scale;
  const panelHeight = Math.max(28, height * scale);
  const shown = panels.slice(0, MAX_PANELS);
  let note = "";
  if (panels.length > MAX_PANELS) {
    note = `the first ${MAX_PANELS} of ${panels.length} blocks of the other dimensions`;
  }
  return {
    tensor, cuts, rows, columns, high, wide, inRow, note,
    down: rows < 0 ? whole : runs[rows],
    across: columns < 0 ? whole : runs[columns],
    w: panelWidth,
    h: panelHeight,
    panels: shown,
    tall: Math.ceil(shown.length / inRow) * (panelHeight + PANEL_GAP),
  };
}

function paint(canvas, picture) {
  const { tensor, cuts, rows, columns, w, h } = picture;
  const partial = cuts.includes(PARTIAL);
  const offsets = holderOffsets(cuts);
  const inks = { ink: colour("ink"), line: colour("line"), ground: colour("ground") };
  const pen = sized(canvas, MAX_WIDTH, picture.tall);
  const cells = [];
  picture.panels.forEach(([base, at], k) => {
    const x0 = k % picture.inRow * (w + PANEL_GAP);
    const y0 = Math.floor(k / picture.inRow) * (h + PANEL_GAP);
    for (const line of picture.down) {
      for (const column of picture.across) {
        const first = base + line.part + column.part;
        const cell = {
          x: x0 + w * column.low / picture.wide,
          y: y0 + h * line.low / picture.high,
          w: w * (column.high - column.low) / picture.wide,
          h: h * (line.high - line.low) / picture.high,
          ranks: offsets.map((offset) => first + offset),
          at: [...at, [rows, line], [columns, column]],
        };
        drawCell(pen, cell, partial, inks);
        cells.push(cell);
      }
    }
  });
  canvas.onpointermove = (event) => {
    const { offsetX: x, offsetY: y } = event;
    const cell = cells.find((each) =>
      x >= each.x && x < each.x + each.w && y >= each.y && y < each.y + each.h);
    showTip(cell ? cellText(tensor, cell, partial) : "", event.clientX, event.clientY);
  };
  canvas.onpointerleave = () => showTip("");
}

// If only one rank is to be shown, the blocks that it does not hold are left empty.
function drawCell(pen, cell, partial, inks) {
  const wanted = byId("tensor-rank").value;
  pen.lineWidth = 0.7;
  if (wanted !== "" && !cell.ranks.includes(Number(wanted))) {
    pen.strokeStyle = inks.line;
    pen.strokeRect(cell.x + 0.5, cell.y + 0.5, cell.w - 1, cell.h - 1);
    return;
  }
  const upright = cell.h > cell.w * 1.4; // stripes and numbers run along the longer side
  drawStripes(pen, cell, upright);
  pen.strokeStyle = inks.ink;
  if (cell.w > 3 && cell.h > 3) {
    pen.strokeRect(cell.x + 0.5, cell.y + 0.5, cell.w - 1, cell.h - 1);
  }
  drawNumbers(pen, cell, partial, inks, upright);
}

function drawStripes(pen, cell, upright) {
  const most = clamp(Math.floor(Math.max(cell.h, cell.w) / 6), 1, MAX_STRIPES);
  const every = Math.ceil(cell.ranks.length / most);
  const stripes = cell.ranks.filter((_, k) => k % every === 0);
  const step = (upright ? cell.h : cell.w) / stripes.length;
  stripes.forEach((rank, k) => {
    pen.fillStyle = rankColour(rank);
    if (upright) pen.fillRect(cell.x, cell.y + k * step, cell.w, step + 0.3);
    else pen.fillRect(cell.x + k * step, cell.y, step + 0.3, cell.h);
  });
}

function drawNumbers(pen, cell, partial, inks, upright) {
  const length = upright ? cell.h : cell.w;
  const thickness = upright ? cell.w : cell.h;
  if (thickness < 8) return;
  const size = Math.min(11, thickness - 1);
  const text = ranksText(cell.ranks, partial, Math.floor(length / (size * 0.62)));
  pen.save();
  pen.font = `${size}px "DejaVu Sans", Arial, sans-serif`;
  pen.fillStyle = inks.ink;
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  pen.translate(cell.x + cell.w / 2, cell.y + cell.h / 2);
  if (upright && pen.measureText(text).width > cell.w) pen.rotate(-Math.PI / 2);
  pen.strokeStyle = inks.ground; // an outline makes the number readable on every colour
  pen.lineWidth = 2.4;
  pen.lineJoin = "round";
  pen.globalAlpha = 0.75;
  pen.strokeText(text, 0, 0);
  pen.globalAlpha = 1;
  pen.fillText(text, 0, 0);
  pen.restore();
}

function cellText(tensor, cell, partial) {
  const names = data.layouts.tensors[tensor][3];
  const indices = cell.at
    .filter(([dimension]) => dimension >= 0)
    .map(([dimension, run]) => `${names[dimension]} ${run.text}`);
  let holders = `rank ${cell.ranks[0]}`;
  if (cell.ranks.length > 1) holders = `ranks ${ranksText(cell.ranks, partial, 160)}`;
  if (partial) holders += ", each with a partial result";
  else if (cell.ranks.length > 1) holders += ", each with a copy";
  return `${holders}\n${indices.join(", ")}`;
}

// ---- the cards ----------------------------------------------------------------------------------

function layoutText(tensor, layout) {
  const [, , bound, names, layouts] = data.layouts.tensors[tensor];
  const cuts = layouts[layout].slice(1);
  const texts = [];
  bound.forEach((_, dimension) => {
    let parts = 1;
    mesh.forEach((factor, axis) => { if (cuts[axis] === dimension) parts *= factor; });
    if (parts > 1) texts.push(`${names[dimension]} in ${parts} parts`);
  });
  if (!texts.length) texts.push("not cut");
  const partials = offsetsAlong(PARTIAL, cuts).length;
  const copies = offsetsAlong(EVERYWHERE, cuts).length;
  if (partials > 1) texts.push(`${partials} partial results`);
  if (copies > 1) texts.push(`on ${copies} ranks each`);
  return `${layouts[layout][0]}: ${texts.join(", ")}`;
}

// A card has its final size at once, so that nothing on the page moves later; it is painted when
// it comes into view.
function cardOf(tensor, observer) {
  const [name, dtype, bound, , layouts] = data.layouts.tensors[tensor];
  const card = element("div", "", "card");
  card.append(element("h3", name));
  card.append(element("div", `${dtype} ${bound.join("×") || "scalar"}`, "faint"));
  layouts.forEach((_, layout) => {
    const picture = pictureOf(tensor, layout);
    const text = layoutText(tensor, layout);
    const figure = element("figure");
    const canvas = element("canvas");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${name}, ${text}`);
    canvas.style.width = MAX_WIDTH + "px";
    canvas.style.height = picture.tall + "px";
    canvas.paint = () => paint(canvas, picture);
    observer.observe(canvas);
    const caption = picture.note ? `${text} (${picture.note})` : text;
    figure.append(canvas, element("figcaption", caption));
    card.append(figure);
  });
  return card;
}

function tensorsPart() {
  const cards = byId("cards");
  const filter = byId("tensor-filter");
  const rank = byId("tensor-rank");
  const moreButton = byId("tensor-more");
  const observer = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (!entry.isIntersecting) return;
    observer.unobserve(entry.target);
    entry.target.paint();
  }), { rootMargin: "200px" });
  let most = CARDS_AT_A_TIME;
  const show = () => {
    const wanted = filter.value.toLowerCase();
    const tensors = data.layouts.tensors;
    const found = [...tensors.keys()].filter((k) => tensors[k][0].toLowerCase().includes(wanted));
    observer.disconnect();
    const shown = printing ? found : found.slice(0, most);
    cards.replaceChildren(...shown.map((tensor) => cardOf(tensor, observer)));
    if (printing) cards.querySelectorAll("canvas").forEach((canvas) => canvas.paint());
    moreButton.hidden = found.length <= most;
    moreButton.textContent = `Show more of ${found.length} tensors`;
  };
  filter.oninput = () => {
    most = CARDS_AT_A_TIME;
    show();
  };
  moreButton.onclick = () => {
    most += CARDS_AT_A_TIME;
    show();
  };
  rank.max = ranksInMesh - 1;
  rank.oninput = show;
  dark.addEventListener("change", show);
  beforePrinting.push(show);
  afterPrinting.push(show);
  show();
}
