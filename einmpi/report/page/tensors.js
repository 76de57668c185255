// Which rank holds which part of a tensor: pictures made from the layouts when they come into view.

const AT_A_TIME = 48, PANELS = 12, FINE = 8, WIDE = 240, TALL = 190;
const mesh = data.layouts.mesh;
const strides = mesh.map((_, axis) => mesh.slice(axis + 1).reduce((a, b) => a * b, 1));
const ranksInMesh = mesh.reduce((a, b) => a * b, 1);

// Runs of indices of a dimension: [start, stop, what the ranks that hold it have in common of their number].
function segments(extent, dimension, cuts) {
  const axes = mesh.map((_, axis) => axis).filter((axis) => cuts[axis] === dimension);
  if (!axes.length) return [[0, extent, 0]];
  const window_ = data.layouts.windows[extent].find((group) => group.includes(axes[0]));
  const blocks = window_.reduce((count, axis) => count * mesh[axis], 1);
  const found = [];
  for (let k = 0; k < blocks; k += 1) {
    const start = Math.ceil(k * extent / blocks), stop = Math.ceil((k + 1) * extent / blocks);
    let rest = k, part = 0;
    for (const axis of [...window_].reverse()) {
      if (axes.includes(axis)) part += rest % mesh[axis] * strides[axis];
      rest = Math.floor(rest / mesh[axis]);
    }
    const last = found[found.length - 1];
    if (last && last[2] === part) last[1] = stop;
    else found.push([start, stop, part]);
  }
  return found;
}

// The numbers to add for ranks that differ only on the axes of this kind: -1 the same block, -2 partial results of it.
function others(kind, cuts) {
  let found = [0];
  mesh.forEach((factor, axis) => {
    if (cuts[axis] !== kind) return;
    found = found.flatMap((base) => [...Array(factor).keys()].map((digit) => base + digit * strides[axis]));
  });
  return found;
}

// All blocks of a tensor in a layout: [ranks, [start, stop] of each dimension].
function blocksOf(tensor, layout) {
  const [, , bound, , layouts] = data.layouts.tensors[tensor];
  const cuts = layouts[layout].slice(1);
  const more = others(-1, cuts).flatMap((a) => others(-2, cuts).map((b) => a + b));
  let found = [[0, []]];
  bound.forEach((extent, dimension) => {
    const runs = segments(extent, dimension, cuts);
    found = found.flatMap(([base, ranges]) => runs.map(([start, stop, part]) => [base + part, [...ranges, [start, stop]]]));
  });
  return found.map(([base, ranges]) => [more.map((other) => base + other).sort((a, b) => a - b), ranges]);
}

// Neighbouring numbers get hues far apart; every fourth of 64 has the same lightness.
function rankColour(rank) {
  const hue = rank * 137.508 % 360, shade = dark.matches ? 30 : 72, tint = dark.matches ? 45 : 58;
  return `hsl(${hue.toFixed(1)} ${tint + rank % 3 * 8}% ${shade + (rank % 4 - 1.5) * 5}%)`;
}

function ranksText(ranks, partial, most) {
  const join = partial ? "+" : " ";
  const all = ranks.join(join);
  if (all.length <= most) return all;
  const short = `${ranks[0]}${join}…${join}${ranks[ranks.length - 1]}`;
  return short.length <= most && ranks.length > 1 ? short : ranks.length > 1 && most > 2 ? "×" + ranks.length : "";
}

// Runs as they are drawn: {low, high, part, text}. Many short ones of the same ranks become one, or nobody would see them.
function drawnRuns(runs) {
  const own = new Map();
  for (const [start, stop, part] of runs) own.set(part, [...(own.get(part) || []), [start, stop]]);
  if (runs.length <= FINE || own.size === runs.length) {
    return runs.map(([start, stop, part]) => ({ low: start, high: stop, part, text: `${start}:${stop}` }));
  }
  let low = 0;
  return [...own].map(([part, pieces]) => {
    const high = pieces.reduce((sum, [start, stop]) => sum + stop - start, low);
    const shown = pieces.slice(0, 4).map(([start, stop]) => `${start}:${stop}`).join(" ");
    const drawn = { low, high, part, text: shown + (pieces.length > 4 ? ` … (${pieces.length} runs)` : "") };
    low = high;
    return drawn;
  });
}

// ---- one picture --------------------------------------------------------------------------------------------------------

function drawLayout(canvas, tensor, layout) {
  const [, , bound, , layouts] = data.layouts.tensors[tensor];
  const cuts = layouts[layout].slice(1);
  const runs = bound.map((extent, dimension) => drawnRuns(segments(extent, dimension, cuts)));
  const parts = runs.map((each) => new Set(each.map((run) => run.part)).size);
  const chosen = [...bound.keys()].sort((a, b) => parts[b] - parts[a] || bound[b] - bound[a] || a - b).slice(0, 2).sort((a, b) => a - b);
  const [rows, columns] = chosen.length === 2 ? chosen : [-1, chosen.length ? chosen[0] : -1];
  const whole = [{ low: 0, high: 1, part: 0, text: "" }];
  const down = rows < 0 ? whole : runs[rows], across = columns < 0 ? whole : runs[columns];
  let panels = [[0, []]];
  bound.forEach((_, dimension) => {
    if (dimension === rows || dimension === columns || parts[dimension] === 1) return;
    panels = panels.flatMap(([base, at]) => runs[dimension].map((run) => [base + run.part, [...at, [dimension, run]]]));
  });
  const left = panels.length - PANELS;
  panels = panels.slice(0, PANELS);

  const height = rows < 0 ? 34 : clamp(WIDE * bound[rows] / Math.max(1, bound[columns]), 80, TALL);
  const width = rows < 0 ? (columns < 0 ? 60 : WIDE) : clamp(TALL * bound[columns] / Math.max(1, bound[rows]), 130, WIDE);
  const inRow = panels.length === 1 ? 1 : width > 130 ? 2 : 3;
  const scale = panels.length === 1 ? 1 : (WIDE - 6 * (inRow - 1)) / inRow / width;
  const w = width * scale, h = Math.max(28, height * scale);
  const tall = Math.ceil(panels.length / inRow) * (h + 6);
  canvas.style.width = WIDE + "px";
  const pen = sized(canvas, WIDE, tall);
  const more = others(-1, cuts).flatMap((a) => others(-2, cuts).map((b) => a + b)).sort((a, b) => a - b);
  const partial = cuts.includes(-2), cells = [];
  const extent = (dimension) => dimension < 0 ? 1 : Math.max(1, bound[dimension]);
  panels.forEach(([base, at], k) => {
    const x0 = k % inRow * (w + 6), y0 = Math.floor(k / inRow) * (h + 6);
    for (const line of down) for (const column of across) {
      const cell = { x: x0 + w * column.low / extent(columns), y: y0 + h * line.low / extent(rows),
                     w: w * (column.high - column.low) / extent(columns), h: h * (line.high - line.low) / extent(rows),
                     ranks: more.map((other) => base + line.part + column.part + other),
                     at: [...at, [rows, line], [columns, column]] };
      drawCell(pen, cell, partial);
      cells.push(cell);
    }
  });
  canvas.onpointermove = (event) => {
    const cell = cells.find((c) => event.offsetX >= c.x && event.offsetX < c.x + c.w && event.offsetY >= c.y && event.offsetY < c.y + c.h);
    showTip(cell ? cellText(tensor, cell, partial) : "", event.clientX, event.clientY);
  };
  canvas.onpointerleave = () => showTip("");
  return left > 0 ? `the first ${PANELS} of ${PANELS + left} blocks of the other dimensions` : "";
}

// Where one rank is looked for, blocks that it does not hold are left empty.
function drawCell(pen, cell, partial) {
  const wanted = byId("tensor-rank").value;
  if (wanted !== "" && !cell.ranks.includes(Number(wanted))) {
    pen.strokeStyle = colour("line");
    pen.lineWidth = 0.7;
    pen.strokeRect(cell.x + 0.5, cell.y + 0.5, cell.w - 1, cell.h - 1);
    return;
  }
  const stripes = cell.ranks.length <= 8 ? cell.ranks : cell.ranks.filter((_, k) => k % Math.ceil(cell.ranks.length / 8) === 0);
  const upright = cell.h > cell.w * 1.4; // stripes and numbers along the longer side
  const step = (upright ? cell.h : cell.w) / stripes.length;
  stripes.forEach((rank, k) => {
    pen.fillStyle = rankColour(rank);
    if (upright) pen.fillRect(cell.x, cell.y + k * step, cell.w, step + 0.3);
    else pen.fillRect(cell.x + k * step, cell.y, step + 0.3, cell.h);
  });
  pen.strokeStyle = colour("ink");
  pen.lineWidth = 0.7;
  if (cell.w > 3 && cell.h > 3) pen.strokeRect(cell.x + 0.5, cell.y + 0.5, cell.w - 1, cell.h - 1);
  const [long, short] = upright ? [cell.h, cell.w] : [cell.w, cell.h];
  if (short < 8) return;
  const size = Math.min(11, short - 1);
  const text = ranksText(cell.ranks, partial, Math.floor(long / (size * 0.62)));
  pen.save();
  pen.font = `${size}px "DejaVu Sans", Arial, sans-serif`;
  pen.fillStyle = colour("ink");
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  pen.translate(cell.x + cell.w / 2, cell.y + cell.h / 2);
  if (upright && pen.measureText(text).width > cell.w) pen.rotate(-Math.PI / 2);
  pen.fillText(text, 0, 0);
  pen.restore();
}

function cellText(tensor, cell, partial) {
  const names = data.layouts.tensors[tensor][3];
  const where = cell.at.filter(([d]) => d >= 0).map(([d, run]) => `${names[d]} ${run.text}`).join(", ");
  const who = cell.ranks.length > 1 ? `ranks ${ranksText(cell.ranks, partial, 160)}` : `rank ${cell.ranks[0]}`;
  return `${who}${partial ? ", each with a partial result" : cell.ranks.length > 1 ? ", all the same" : ""}\n${where}`;
}

// ---- the cards ----------------------------------------------------------------------------------------------------------

function layoutText(tensor, layout) {
  const [, , bound, names, layouts] = data.layouts.tensors[tensor];
  const cuts = layouts[layout].slice(1);
  const cut = bound.map((_, d) => mesh.reduce((parts, factor, axis) => cuts[axis] === d ? parts * factor : parts, 1));
  const shown = cut.map((parts, d) => parts > 1 ? `${names[d]} in ${parts}` : "").filter(Boolean).join(", ");
  const same = others(-1, cuts).length, partial = others(-2, cuts).length;
  return `${layouts[layout][0]}: ${shown || "not cut"}${partial > 1 ? `, ${partial} partial results` : ""}` +
    `${same > 1 ? `, on ${same} ranks each` : ""}`;
}

function fillCard(card) {
  const tensor = Number(card.dataset.tensor), [name, dtype, bound, , layouts] = data.layouts.tensors[tensor];
  card.replaceChildren(element("h3", name), element("div", `${dtype} ${bound.join("×") || "scalar"}`, "faint"));
  layouts.forEach((_, layout) => {
    const figure = element("figure"), canvas = element("canvas"), text = layoutText(tensor, layout);
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${name}, ${text}`);
    figure.append(canvas, element("figcaption", text));
    const note = drawLayout(canvas, tensor, layout);
    if (note) figure.append(element("figcaption", `(${note})`));
    card.append(figure);
  });
}

function tensorsPart() {
  const cards = byId("cards"), filter = byId("tensor-filter"), button = byId("tensor-more");
  const watch = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (!entry.isIntersecting) return;
    watch.unobserve(entry.target);
    fillCard(entry.target);
  }), { rootMargin: "200px" });
  let most = AT_A_TIME;
  const show = () => {
    const wanted = filter.value.toLowerCase();
    const found = [...data.layouts.tensors.keys()].filter((k) => data.layouts.tensors[k][0].toLowerCase().includes(wanted));
    watch.disconnect();
    cards.replaceChildren(...found.slice(0, most).map((tensor) => {
      const card = element("div", "", "card");
      card.dataset.tensor = tensor;
      watch.observe(card);
      return card;
    }));
    button.hidden = found.length <= most;
    button.textContent = `Show more of ${found.length} tensors`;
  };
  filter.oninput = () => { most = AT_A_TIME; show(); };
  button.onclick = () => { most += AT_A_TIME; show(); };
  byId("tensor-rank").max = ranksInMesh - 1;
  byId("tensor-rank").oninput = show;
  dark.addEventListener("change", show);
  show();
}
