// What every rank did when: one track a rank. The wheel zooms, dragging moves, arrows go from step to step.

const AXIS = 26, NAMES_WIDE = 46, MOST_TALL = 620;

// Numbers of seven bits a byte, three for each span, to arrays of starts, ends and steps.
function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const numbers = [];
  let value = 0, unit = 1;
  for (const byte of bytes) {
    value += (byte & 127) * unit;
    if (byte & 128) { unit *= 128; continue; }
    numbers.push(value);
    value = 0;
    unit = 1;
  }
  const signed = (number) => number % 2 ? -(number + 1) / 2 : number / 2;
  const count = numbers.length / 3;
  const track = { starts: new Float64Array(count), ends: new Float64Array(count), steps: new Int32Array(count) };
  let before = 0, last = -1;
  for (let k = 0; k < count; k += 1) {
    track.starts[k] = before + signed(numbers[3 * k]);
    track.ends[k] = before = track.starts[k] + numbers[3 * k + 1];
    track.steps[k] = last = last + 1 + signed(numbers[3 * k + 2]);
  }
  return track;
}

// The first span that ends after a time.
function firstAfter(track, time) {
  let low = 0, high = track.ends.length;
  while (low < high) {
    const middle = low + high >> 1;
    if (track.ends[middle] <= time) low = middle + 1; else high = middle;
  }
  return low;
}

function timelinePart() {
  const canvas = byId("track"), tracks = data.timeline.tracks.map(unpack), steps = data.timeline.steps;
  const end = Math.max(1, ...tracks.map((track) => track.ends.length ? track.ends[track.ends.length - 1] : 0));
  const row = clamp(Math.floor((MOST_TALL - AXIS) / tracks.length), 9, 26);
  const tall = Math.min(MOST_TALL, tracks.length * row + AXIS);
  let from = 0, to = end, first = 0, chosen = null, waiting = false;
  const wide = () => canvas.clientWidth - NAMES_WIDE;
  const xOf = (time) => NAMES_WIDE + (time - from) / (to - from) * wide();
  const timeAt = (x) => from + (x - NAMES_WIDE) / wide() * (to - from);

  function view(start, length) {
    length = clamp(length, Math.min(end, 4), end);
    from = clamp(start, 0, end - length);
    to = from + length;
    canvas.dataset.from = from;
    canvas.dataset.to = to;
    byId("track-range").textContent = `${showTime(from)} to ${showTime(to)} of ${showTime(end)}`;
    if (!waiting) requestAnimationFrame(draw);
    waiting = true;
  }
  const zoom = (by, time) => view(time - (time - from) * by, (to - from) * by);
  const scroll = (by) => {
    first = clamp(first + by, 0, Math.max(0, tracks.length - (tall - AXIS) / row));
    view(from, to - from);
  };

  function draw() {
    waiting = false;
    const pen = sized(canvas, canvas.clientWidth, tall), ink = colour("ink");
    pen.fillStyle = colour("idle");
    pen.fillRect(NAMES_WIDE, AXIS, wide(), tall - AXIS);
    pen.font = '11px "DejaVu Sans", Arial, sans-serif';
    pen.textBaseline = "middle";
    for (let rank = Math.floor(first); rank < tracks.length && AXIS + (rank - first) * row < tall; rank += 1) {
      drawTrack(pen, tracks[rank], AXIS + (rank - first) * row);
    }
    pen.fillStyle = colour("ground");
    pen.fillRect(0, 0, canvas.clientWidth, AXIS);
    pen.fillRect(0, AXIS, NAMES_WIDE, tall);
    pen.fillStyle = ink;
    const every = Math.ceil(13 / row);
    for (let rank = Math.ceil(first); AXIS + (rank - first) * row < tall && rank < tracks.length; rank += 1) {
      if (rank % every) continue;
      pen.fillText((tracks.length > 32 ? "" : "rank ") + rank, 2, AXIS + (rank - first + 0.5) * row);
    }
    drawTimes(pen);
    if (chosen) {
      pen.strokeStyle = ink;
      pen.lineWidth = 2;
      const track = tracks[chosen.rank], x = xOf(track.starts[chosen.span]);
      pen.strokeRect(x, AXIS + (chosen.rank - first) * row, Math.max(2, xOf(track.ends[chosen.span]) - x), row);
    }
  }

  // There may be many more spans than pixels: asking the browser for sizes and colours here would take seconds.
  function drawTrack(pen, track, y) {
    const colours = data.timeline.kinds.map(colour), ground = colour("ground");
    const scale = wide() / (to - from), most = canvas.clientWidth;
    let drawn = NAMES_WIDE, last = -1;
    for (let k = firstAfter(track, from); k < track.starts.length && track.starts[k] < to; k += 1) {
      const right = Math.min(NAMES_WIDE + (track.ends[k] - from) * scale, most);
      if (right - drawn < 0.9) continue; // nothing to see beside what is there
      const x = Math.max(NAMES_WIDE + (track.starts[k] - from) * scale, drawn), step = steps[track.steps[k]];
      if (step[0] !== last) pen.fillStyle = colours[last = step[0]];
      pen.fillRect(x, y + 1, right - x > 4 ? right - x - 0.7 : Math.max(right - x, 0.9), row - 2);
      drawn = right;
      if (right - x > 60 && row >= 13) {
        pen.fillStyle = ground;
        label(pen, step[1], x, right, y + row / 2);
        last = -1;
      }
    }
  }

  function label(pen, text, x, right, y) {
    const room = Math.floor((right - x - 8) / 7);
    pen.fillText(text.length > room ? text.slice(0, room - 1) + "…" : text, x + 4, y);
  }

  function drawTimes(pen) {
    const about = (to - from) / Math.max(2, wide() / 120);
    const power = 10 ** Math.floor(Math.log10(about));
    const step = Math.max(1, [1, 2, 5, 10].find((unit) => unit * power >= about) * power);
    pen.strokeStyle = colour("line");
    pen.lineWidth = 1;
    for (let time = Math.ceil(from / step) * step; time <= to; time += step) {
      const x = xOf(time), text = showTime(time).replace(/\.0+ |(\.\d*?)0+ /, "$1 ");
      pen.fillText(text, Math.min(x + 3, canvas.clientWidth - 6 * text.length), AXIS / 2);
      pen.beginPath();
      pen.moveTo(x, 4);
      pen.lineTo(x, AXIS);
      pen.stroke();
    }
  }

  function spanText(rank, span) {
    const track = tracks[rank], [kind, vertex, line, nbytes, operations] = steps[track.steps[span]];
    const micros = track.ends[span] - track.starts[span], name = data.timeline.kinds[kind];
    const when = `${showTime(micros)} from ${showTime(track.starts[span])}`;
    const lines = [`rank ${rank}, ${name}${vertex ? " " + vertex : ""}: ${when}`, line];
    const seconds = micros / 1e6; // of a span too short to measure there is no rate
    if (nbytes) lines.push(showBytes(nbytes) + (seconds ? `, ${showBytes(nbytes / seconds)}/s` : ""));
    const rate = seconds ? `, ${(operations / seconds / 1e9).toPrecision(3)} Gop/s` : "";
    if (operations) lines.push(`${operations.toLocaleString("en")} operations${rate}`);
    return lines.join("\n");
  }

  function choose(rank, span) {
    rank = clamp(rank, 0, tracks.length - 1);
    const track = tracks[rank];
    if (!track.starts.length) return;
    span = clamp(span, 0, track.starts.length - 1);
    chosen = { rank, span };
    if (rank < first || AXIS + (rank + 1 - first) * row > tall) scroll(rank - first - (tall - AXIS) / row / 2);
    const middle = (track.starts[span] + track.ends[span]) / 2;
    view(middle < from || middle > to ? middle - (to - from) / 2 : from, to - from);
    const box = canvas.getBoundingClientRect(), text = spanText(rank, span);
    showTip(text, box.left + xOf(clamp(middle, from, to)), box.top + AXIS + (rank - first + 0.5) * row);
    byId("track-said").textContent = text;
  }

  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (event.shiftKey) scroll(Math.sign(event.deltaY) * 4);
    else zoom(event.deltaY < 0 ? 0.8 : 1.25, timeAt(event.offsetX));
  }, { passive: false });
  let held = null;
  canvas.addEventListener("pointerdown", (event) => { held = { x: event.clientX, y: event.clientY, from, first }; });
  addEventListener("pointerup", () => { held = null; });
  canvas.addEventListener("pointermove", (event) => {
    if (held) {
      showTip("");
      first = held.first;
      scroll((held.y - event.clientY) / row);
      view(held.from + (held.x - event.clientX) / wide() * (to - from), to - from);
      return;
    }
    const rank = Math.floor(first + (event.offsetY - AXIS) / row), track = tracks[rank], time = timeAt(event.offsetX);
    const near = (to - from) / wide();
    const span = track && event.offsetY > AXIS && event.offsetX > NAMES_WIDE ? firstAfter(track, time - near) : -1;
    const found = span >= 0 && span < track.starts.length && track.starts[span] <= time + near;
    showTip(found ? spanText(rank, span) : "", event.clientX, event.clientY);
  });
  canvas.addEventListener("pointerleave", () => showTip(""));
  canvas.addEventListener("blur", () => { chosen = null; showTip(""); view(from, to - from); });
  canvas.addEventListener("dblclick", () => view(0, end));
  const at = () => chosen ? tracks[chosen.rank].starts[chosen.span] : (from + to) / 2;
  const keys = {
    ArrowRight: () => choose(chosen ? chosen.rank : 0, chosen ? chosen.span + 1 : 0),
    ArrowLeft: () => choose(chosen ? chosen.rank : 0, chosen ? chosen.span - 1 : 0),
    ArrowDown: () => choose(chosen ? chosen.rank + 1 : 0, nearest(1)),
    ArrowUp: () => choose(chosen ? chosen.rank - 1 : 0, nearest(-1)),
    "+": () => zoom(0.7, at()), "=": () => zoom(0.7, at()), "-": () => zoom(1 / 0.7, at()), 0: () => view(0, end),
    Escape: () => canvas.blur(),
  };
  function nearest(by) {
    return chosen ? firstAfter(tracks[clamp(chosen.rank + by, 0, tracks.length - 1)], at()) : 0;
  }
  canvas.addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  byId("track-in").onclick = () => zoom(0.5, (from + to) / 2);
  byId("track-out").onclick = () => zoom(2, (from + to) / 2);
  byId("track-reset").onclick = () => { first = 0; view(0, end); };
  addEventListener("resize", () => view(from, to - from));
  dark.addEventListener("change", () => view(from, to - from));
  canvas.style.height = tall + "px";
  view(0, end);
}
