// What every rank did and when: one track per rank. The wheel zooms, dragging moves, arrow keys go
// from step to step.

const AXIS_HEIGHT = 26; // pixels
const NAMES_WIDTH = 46;
const MAX_TIMELINE_HEIGHT = 620;
const MAX_PRINTED_HEIGHT = 16000; // browsers draw no larger canvas

// Decode numbers of seven bits a byte, three for each span, to arrays of starts, ends and steps.
function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const numbers = [];
  let value = 0;
  let unit = 1;
  for (const byte of bytes) {
    value += (byte & 127) * unit;
    if (byte & 128) {
      unit *= 128;
    } else {
      numbers.push(value);
      value = 0;
      unit = 1;
    }
  }
  const signed = (number) => number % 2 ? -(number + 1) / 2 : number / 2;
  const count = numbers.length / 3;
  const starts = new Float64Array(count);
  const ends = new Float64Array(count);
  const steps = new Int32Array(count);
  let endBefore = 0;
  let stepBefore = -1;
  for (let k = 0; k < count; k += 1) {
    starts[k] = endBefore + signed(numbers[3 * k]);
    ends[k] = starts[k] + numbers[3 * k + 1];
    steps[k] = stepBefore + 1 + signed(numbers[3 * k + 2]);
    endBefore = ends[k];
    stepBefore = steps[k];
  }
  return { starts, ends, steps };
}

// The first span that ends after a time.
function firstAfter(track, time) {
  let low = 0;
  let high = track.ends.length;
  while (low < high) {
    const middle = low + high >> 1;
    if (track.ends[middle] <= time) low = middle + 1;
    else high = middle;
  }
  return low;
}

function timelinePart() {
  const canvas = byId("track");
  const tracks = data.timeline.tracks.map(unpack);
  const steps = data.timeline.steps;
  const lastEnds = tracks.map((track) => track.ends.length ? track.ends[track.ends.length - 1] : 0);
  const end = Math.max(1, ...lastEnds);
  const row = clamp(Math.floor((MAX_TIMELINE_HEIGHT - AXIS_HEIGHT) / tracks.length), 9, 26);
  const all = tracks.length * row + AXIS_HEIGHT;
  let tall = Math.min(MAX_TIMELINE_HEIGHT, all);
  let from = 0; // the visible times, in microseconds
  let to = end;
  let first = 0; // the rank at the top
  let chosen = null; // the span that the keyboard has moved to: {rank, span}
  let waiting = false; // for the browser to draw
  // A rank has a second track if tensors moved while it computed.
  const perRank = tracks.length / data.timeline.ranks;
  const shortName = (track) => track % perRank ? "" : `${track / perRank}`;
  const trackName = (track) => track % perRank ? "moving" : `rank ${track / perRank}`;
  const wide = () => canvas.clientWidth - NAMES_WIDTH;
  const xOf = (time) => NAMES_WIDTH + (time - from) / (to - from) * wide();
  const yOf = (rank) => AXIS_HEIGHT + (rank - first) * row;
  const timeAt = (x) => from + (x - NAMES_WIDTH) / wide() * (to - from);

  function view(start, length) {
    const shown = clamp(length, Math.min(end, 4), end);
    from = clamp(start, 0, end - shown);
    to = from + shown;
    canvas.dataset.from = from;
    canvas.dataset.to = to;
    const range = `${showTime(from)} to ${showTime(to)} of ${showTime(end)}`;
    byId("track-range").textContent = range;
    if (!waiting) requestAnimationFrame(draw);
    waiting = true;
  }

  function zoom(factor, time) {
    view(time - (time - from) * factor, (to - from) * factor);
  }

  function scroll(ranks) {
    first = clamp(first + ranks, 0, Math.max(0, tracks.length - (tall - AXIS_HEIGHT) / row));
    view(from, to - from);
  }

  function draw() {
    waiting = false;
    const pen = sized(canvas, canvas.clientWidth, tall);
    const ink = colour("ink");
    pen.fillStyle = colour("idle");
    pen.fillRect(NAMES_WIDTH, AXIS_HEIGHT, wide(), tall - AXIS_HEIGHT);
    pen.font = '11px "DejaVu Sans", Arial, sans-serif';
    pen.textBaseline = "middle";
    for (let rank = Math.floor(first); rank < tracks.length && yOf(rank) < tall; rank += 1) {
      drawTrack(pen, tracks[rank], yOf(rank));
    }
    pen.fillStyle = colour("ground");
    pen.fillRect(0, 0, canvas.clientWidth, AXIS_HEIGHT);
    pen.fillRect(0, AXIS_HEIGHT, NAMES_WIDTH, tall);
    pen.fillStyle = ink;
    const every = Math.ceil(13 / row);
    for (let rank = Math.ceil(first); rank < tracks.length && yOf(rank) < tall; rank += 1) {
      if (rank % every) continue;
      const name = tracks.length > 32 ? shortName(rank) : trackName(rank);
      pen.fillText(name, 2, yOf(rank + 0.5));
    }
    drawTimes(pen);
    if (chosen) {
      const track = tracks[chosen.rank];
      const x = xOf(track.starts[chosen.span]);
      const width = Math.max(2, xOf(track.ends[chosen.span]) - x);
      pen.strokeStyle = ink;
      pen.lineWidth = 2;
      pen.strokeRect(x, yOf(chosen.rank), width, row);
    }
  }

  // There may be many more spans than pixels: asking the browser for sizes and colours for each
  // would take seconds.
  function drawTrack(pen, track, y) {
    const colours = data.timeline.kinds.map(colour);
    const ground = colour("ground");
    const scale = wide() / (to - from);
    const most = canvas.clientWidth;
    let drawn = NAMES_WIDTH;
    let fill = -1; // the kind whose colour is set
    for (let k = firstAfter(track, from); k < track.starts.length; k += 1) {
      if (track.starts[k] >= to) break;
      const right = Math.min(NAMES_WIDTH + (track.ends[k] - from) * scale, most);
      if (right - drawn < 0.9) continue; // it would not be visible
      const x = Math.max(NAMES_WIDTH + (track.starts[k] - from) * scale, drawn);
      const [kind, vertex] = steps[track.steps[k]];
      if (kind !== fill) {
        pen.fillStyle = colours[kind];
        fill = kind;
      }
      const width = right - x > 4 ? right - x - 0.7 : Math.max(right - x, 0.9);
      pen.fillRect(x, y + 1, width, row - 2);
      drawn = right;
      if (right - x > 60 && row >= 13) {
        pen.fillStyle = ground;
        fill = -1;
        drawLabel(pen, vertex, x, right, y + row / 2);
      }
    }
  }

  function drawLabel(pen, text, x, right, y) {
    const room = Math.floor((right - x - 8) / 7); // characters
    pen.fillText(text.length > room ? text.slice(0, room - 1) + "…" : text, x + 4, y);
  }

  function drawTimes(pen) {
    const about = (to - from) / Math.max(2, wide() / 120);
    const power = 10 ** Math.floor(Math.log10(about));
    const step = Math.max(1, [1, 2, 5, 10].find((unit) => unit * power >= about) * power);
    pen.strokeStyle = colour("line");
    pen.lineWidth = 1;
    for (let time = Math.ceil(from / step) * step; time <= to; time += step) {
      const x = xOf(time);
      const text = showTime(time).replace(/\.0+ |(\.\d*?)0+ /, "$1 ");
      pen.fillText(text, Math.min(x + 3, canvas.clientWidth - 6 * text.length), AXIS_HEIGHT / 2);
      pen.beginPath();
      pen.moveTo(x, 4);
      pen.lineTo(x, AXIS_HEIGHT);
      pen.stroke();
    }
  }

  function spanText(rank, span) {
    const track = tracks[rank];
    const [kind, vertex, line, nbytes, operations] = steps[track.steps[span]];
    const micros = track.ends[span] - track.starts[span];
    const seconds = micros / 1e6; // 0 if the span was too short to measure: then there is no rate
    const name = data.timeline.kinds[kind] + (vertex ? ` ${vertex}` : "");
    const when = `${showTime(micros)} from ${showTime(track.starts[span])}`;
    const lines = [`${trackName(rank)}, ${name}: ${when}`, line];
    if (nbytes) {
      const rate = seconds ? `, ${showBytes(nbytes / seconds)}/s` : "";
      lines.push(showBytes(nbytes) + rate);
    }
    if (operations) {
      const rate = seconds ? `, ${(operations / seconds / 1e9).toPrecision(3)} Gop/s` : "";
      lines.push(`${operations.toLocaleString("en")} operations${rate}`);
    }
    return lines.join("\n");
  }

  // Move the keyboard's choice to a span, scroll to it and describe it.
  function choose(wantedRank, wantedSpan) {
    const rank = clamp(wantedRank, 0, tracks.length - 1);
    const track = tracks[rank];
    if (!track.starts.length) return;
    const span = clamp(wantedSpan, 0, track.starts.length - 1);
    chosen = { rank, span };
    const visible = rank >= first && yOf(rank + 1) <= tall;
    if (!visible) scroll(rank - first - (tall - AXIS_HEIGHT) / row / 2);
    const middle = (track.starts[span] + track.ends[span]) / 2;
    const inView = middle >= from && middle <= to;
    view(inView ? from : middle - (to - from) / 2, to - from);
    const box = canvas.getBoundingClientRect();
    const text = spanText(rank, span);
    showTip(text, box.left + xOf(clamp(middle, from, to)), box.top + yOf(rank + 0.5));
    byId("track-said").textContent = text;
  }

  // ---- pointer ---------------------------------------------------------------------------------

  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (event.shiftKey) scroll(Math.sign(event.deltaY) * 4);
    else zoom(event.deltaY < 0 ? 0.8 : 1.25, timeAt(event.offsetX));
  }, { passive: false });

  let dragged = null; // where dragging began
  canvas.addEventListener("pointerdown", (event) => {
    dragged = { x: event.clientX, y: event.clientY, from, first };
  });
  addEventListener("pointerup", () => { dragged = null; });

  function drag(event) {
    showTip("");
    first = dragged.first;
    scroll((dragged.y - event.clientY) / row);
    view(dragged.from + (dragged.x - event.clientX) / wide() * (to - from), to - from);
  }

  function describe(event) {
    const rank = Math.floor(first + (event.offsetY - AXIS_HEIGHT) / row);
    const track = tracks[rank];
    let text = "";
    if (track && event.offsetY > AXIS_HEIGHT && event.offsetX > NAMES_WIDTH) {
      const time = timeAt(event.offsetX);
      const pixel = (to - from) / wide();
      const span = firstAfter(track, time - pixel);
      const found = span < track.starts.length && track.starts[span] <= time + pixel;
      if (found) text = spanText(rank, span);
    }
    showTip(text, event.clientX, event.clientY);
  }

  canvas.addEventListener("pointermove", (event) => {
    if (dragged) drag(event);
    else describe(event);
  });
  canvas.addEventListener("pointerleave", () => showTip(""));
  canvas.addEventListener("dblclick", () => view(0, end));
  canvas.addEventListener("blur", () => {
    chosen = null;
    showTip("");
    view(from, to - from);
  });

  // ---- keyboard and buttons --------------------------------------------------------------------

  const chosenTime = () => chosen ? tracks[chosen.rank].starts[chosen.span] : (from + to) / 2;

  function chooseStep(by) {
    if (chosen) choose(chosen.rank, chosen.span + by);
    else choose(0, 0);
  }

  function chooseRank(by) {
    if (!chosen) {
      choose(0, 0);
      return;
    }
    const rank = clamp(chosen.rank + by, 0, tracks.length - 1);
    choose(rank, firstAfter(tracks[rank], chosenTime()));
  }

  const keys = {
    ArrowRight: () => chooseStep(1),
    ArrowLeft: () => chooseStep(-1),
    ArrowDown: () => chooseRank(1),
    ArrowUp: () => chooseRank(-1),
    "+": () => zoom(0.7, chosenTime()),
    "=": () => zoom(0.7, chosenTime()),
    "-": () => zoom(1 / 0.7, chosenTime()),
    0: () => view(0, end),
    Escape: () => canvas.blur(),
  };
  canvas.addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  byId("track-in").onclick = () => zoom(0.5, (from + to) / 2);
  byId("track-out").onclick = () => zoom(2, (from + to) / 2);
  byId("track-reset").onclick = () => {
    first = 0;
    view(0, end);
  };
  addEventListener("resize", () => view(from, to - from));
  dark.addEventListener("change", () => view(from, to - from));

  // On paper nothing can be scrolled: all ranks, from the beginning to the end.
  let seen = null; // what is visible on the screen while the page is printed
  beforePrinting.push(() => {
    seen = { from, length: to - from, first, chosen };
    tall = Math.min(MAX_PRINTED_HEIGHT, all);
    first = 0;
    chosen = null;
    view(0, end);
    draw();
  });
  afterPrinting.push(() => {
    tall = Math.min(MAX_TIMELINE_HEIGHT, all);
    first = seen.first;
    chosen = seen.chosen;
    view(seen.from, seen.length);
    draw();
  });
  canvas.style.height = tall + "px";
  view(0, end);
}
