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
    found = found.flatMap(([base, ranges]) =>
      runs.map(([start, stop, part]) => [base + part, [...ranges, [start, stop]]]));
  });
  return found.map(([base, ranges]) => [more.map((other) => base + other).sort((a, b) => a - b), ranges]);
}

// Neighbouring numbers get hues far apart; every fourth of 64 has the same lightness.
function rankColour(rank) {
  const hue = rank * 137.508 % 360, shade = dark.matches ? 28 : 76, tint = dark.matches ? 45 : 58;
  return `hsl(${hue.toFixed(1)} ${tint + rank % 3 * 8}% ${shade + (rank % 4 - 1.5) * 5}%)`;
}

function ranksText(ranks, partial, most) {
  const join = partial ? "+" : " ";
  const all = ranks.join(join);
  if (all.length <= most) return all;
  const short = `${ranks[0]}${join}…${join}${ranks[ranks.length - 1]}`;
  return short.length <= most && ranks.length > 1 ? short : ranks.length > 1 && most > 2 ? "×" + ranks.length : "";
}

// Runs as they are drawn: {low, high, part, text}. Many short ones of the same ranks become one, to be seen at all.
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

// ---- one picture ---------------------------------------------------------------------------------------------------

// What is drawn where: two dimensions as rows and columns, further ones that are cut as several panels.
function pictureOf(tensor, layout) {
  const [, , bound, , layouts] = data.layouts.tensors[tensor];
  const cuts = layouts[layout].slice(1);
  const runs = bound.map((extent, dimension) => drawnRuns(segments(extent, dimension, cuts)));
  const parts = runs.map((each) => new Set(each.map((run) => run.part)).size);
  const mostCut = [...bound.keys()].sort((a, b) => parts[b] - parts[a] || bound[b] - bound[a] || a - b);
  const [rows, columns] = [-1, -1, ...mostCut.slice(0, 2).sort((a, b) => a - b)].slice(-2);
  let panels = [[0, []]];
  bound.forEach((_, dimension) => {
    if (dimension === rows || dimension === columns || parts[dimension] === 1) return;
    panels = panels.flatMap(([base, at]) => runs[dimension].map((run) => [base + run.part, [...at, [dimension, run]]]));
  });
  const [down, across] = [rows, columns].map((d) => d < 0 ? [{ low: 0, high: 1, part: 0, text: "" }] : runs[d]);
  const [high, wide] = [rows, columns].map((d) => d < 0 ? 1 : Math.max(1, bound[d]));
  const width = rows < 0 ? (columns < 0 ? 60 : WIDE) : clamp(TALL * wide / high, 130, WIDE);
  const height = rows < 0 ? 34 : clamp(WIDE * high / wide, 80, TALL);
  const inRow = panels.length === 1 ? 1 : width > 130 ? 2 : 3;
  const scale = panels.length === 1 ? 1 : (WIDE - 6 * (inRow - 1)) / inRow / width;
  const w = width * scale, h = Math.max(28, height * scale), shown = Math.min(panels.length, PANELS);
  const note = panels.length > PANELS ? `the first ${PANELS} of ${panels.length} blocks of the other dimensions` : "";
  return { tensor, cuts, rows, columns, down, across, high, wide, inRow, w, h, panels: panels.slice(0, PANELS),
           tall: Math.ceil(shown / inRow) * (h + 6), note };
}

function paint(canvas, picture) {
  const { tensor, cuts, rows, columns, w, h } = picture, partial = cuts.includes(-2), cells = [];
  const pen = sized(canvas, WIDE, picture.tall);
  const inks = { ink: colour("ink"), line: colour("line"), ground: colour("ground") };
  const more = others(-1, cuts).flatMap((a) => others(-2, cuts).map((b) => a + b)).sort((a, b) => a - b);
  picture.panels.forEach(([base, at], k) => {
    const x0 = k % picture.inRow * (w + 6), y0 = Math.floor(k / picture.inRow) * (h + 6);
    for (const line of picture.down) for (const column of picture.across) {
      const cell = { x: x0 + w * column.low / picture.wide, y: y0 + h * line.low / picture.high,
                     w: w * (column.high - column.low) / picture.wide, h: h * (line.high - line.low) / picture.high,
                     ranks: more.map((other) => base + line.part + column.part + other),
                     at: [...at, [rows, line], [columns, column]] };
      drawCell(pen, cell, partial, inks);
      cells.push(cell);
    }
  });
  canvas.onpointermove = (event) => {
    const { offsetX: x, offsetY: y } = event;
    const cell = cells.find((each) => x >= each.x && x < each.x + each.w && y >= each.y && y < each.y + each.h);
    showTip(cell ? cellText(tensor, cell, partial) : "", event.clientX, event.clientY);
  };
  canvas.onpointerleave = () => showTip("");
}

// Where one rank is looked for, blocks that it does not hold are left empty.
function drawCell(pen, cell, partial, inks) {
  const wanted = byId("tensor-rank").value;
  if (wanted !== "" && !cell.ranks.includes(Number(wanted))) {
    pen.strokeStyle = inks.line;
    pen.lineWidth = 0.7;
    pen.strokeRect(cell.x + 0.5, cell.y + 0.5, cell.w - 1, cell.h - 1);
    return;
  }
  const upright = cell.h > cell.w * 1.4; // stripes and numbers along the longer side
  const most = clamp(Math.floor(Math.max(cell.h, cell.w) / 6), 1, 8);
  const every = Math.ceil(cell.ranks.length / most), stripes = cell.ranks.filter((_, k) => k % every === 0);
  const step = (upright ? cell.h : cell.w) / stripes.length;
  stripes.forEach((rank, k) => {
    pen.fillStyle = rankColour(rank);
    if (upright) pen.fillRect(cell.x, cell.y + k * step, cell.w, step + 0.3);
    else pen.fillRect(cell.x + k * step, cell.y, step + 0.3, cell.h);
  });
  pen.strokeStyle = inks.ink;
  pen.lineWidth = 0.7;
  if (cell.w > 3 && cell.h > 3) pen.strokeRect(cell.x + 0.5, cell.y + 0.5, cell.w - 1, cell.h - 1);
  const [long, short] = upright ? [cell.h, cell.w] : [cell.w, cell.h];
  if (short < 8) return;
  const size = Math.min(11, short - 1);
  const text = ranksText(cell.ranks, partial, Math.floor(long / (size * 0.62)));
  pen.save();
  pen.font = `${size}px "DejaVu Sans", Arial, sans-serif`;
  pen.fillStyle = inks.ink;
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  pen.translate(cell.x + cell.w / 2, cell.y + cell.h / 2);
  if (upright && pen.measureText(text).width > cell.w) pen.rotate(-Math.PI / 2);
  pen.strokeStyle = inks.ground; // a rim: the number can be read on every colour
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
  const where = cell.at.filter(([d]) => d >= 0).map(([d, run]) => `${names[d]} ${run.text}`).join(", ");
  const who = cell.ranks.length > 1 ? `ranks ${ranksText(cell.ranks, partial, 160)}` : `rank ${cell.ranks[0]}`;
  return `${who}${partial ? ", each with a partial result" : cell.ranks.length > 1 ? ", all the same" : ""}\n${where}`;
}

// ---- the cards -----------------------------------------------------------------------------------------------------

function layoutText(tensor, layout) {
  const [, , bound, names, layouts] = data.layouts.tensors[tensor];
  const cuts = layouts[layout].slice(1);
  const cut = bound.map((_, d) => mesh.reduce((parts, factor, axis) => cuts[axis] === d ? parts * factor : parts, 1));
  const shown = cut.map((parts, d) => parts > 1 ? `${names[d]} in ${parts}` : "").filter(Boolean).join(", ");
  const same = others(-1, cuts).length, partial = others(-2, cuts).length;
  return `${layouts[layout][0]}: ${shown || "not cut"}${partial > 1 ? `, ${partial} partial results` : ""}` +
    `${same > 1 ? `, on ${same} ranks each` : ""}`;
}

// A card has its size at once, so that nothing on the page moves later; it is painted when it comes into view.
function cardOf(tensor, watch) {
  const [name, dtype, bound, , layouts] = data.layouts.tensors[tensor], card = element("div", "", "card");
  card.append(element("h3", name), element("div", `${dtype} ${bound.join("×") || "scalar"}`, "faint"));
  layouts.forEach((_, layout) => {
    const picture = pictureOf(tensor, layout), text = layoutText(tensor, layout);
    const figure = element("figure"), canvas = element("canvas");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${name}, ${text}`);
    canvas.style.width = WIDE + "px";
    canvas.style.height = picture.tall + "px";
    canvas.paint = () => paint(canvas, picture);
    watch.observe(canvas);
    figure.append(canvas, element("figcaption", picture.note ? `${text} (${picture.note})` : text));
    card.append(figure);
  });
  return card;
}

function tensorsPart() {
  const cards = byId("cards"), filter = byId("tensor-filter"), button = byId("tensor-more");
  const watch = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (!entry.isIntersecting) return;
    watch.unobserve(entry.target);
    entry.target.paint();
  }), { rootMargin: "200px" });
  let most = AT_A_TIME;
  const show = () => {
    const wanted = filter.value.toLowerCase(), tensors = data.layouts.tensors;
    const found = [...tensors.keys()].filter((k) => tensors[k][0].toLowerCase().includes(wanted));
    watch.disconnect();
    cards.replaceChildren(...found.slice(0, most).map((tensor) => cardOf(tensor, watch)));
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
